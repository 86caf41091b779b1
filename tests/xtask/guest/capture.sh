# The same job between two machines, and all of it in a capture.
two_guests
node_file 1
if [ "$GUEST" = a ]; then
    capture_start
    start_target target
    tell serving
    await done 240
    stop_target target
    capture_stop
else
    await serving 120
    initiator 200 | tee "$DIR/initiator"
    [ "$(grep -c '^sha-256 .*: ok' "$DIR/initiator")" -eq 2 ] || fail "not both digests are right"
    tell done
fi
