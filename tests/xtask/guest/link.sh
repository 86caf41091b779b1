# A cable that is cut for 5 s, and one that is cut for longer than every timeout.
two_guests
node_file 12 12
if [ "$GUEST" = a ]; then
    start_target target
    tell serving
    await working.1 120
    say "down for 5 s"
    ip link set "$CARD" down
    sleep 5
    ip link set "$CARD" up
    await done.1 120
    await working.2 120
    say "down for long"
    ip link set "$CARD" down
    await done.2 200
    ip link set "$CARD" up
    until_true 30 busybox ping -c 1 -W 1 10.9.0.2 || fail "the wire does not come back"
    kill -0 "$TARGET" || { cat "$DIR/target"; fail "the target has died"; }
    tell up
    await done.3 120
    stop_target target
    cat "$DIR/target"
else
    await serving 120
    for run in 1 2; do
        initiator 200 >"$DIR/initiator.$run" 2>&1 &
        process=$!
        until_true 100 grep -q workload "$DIR/initiator.$run" || { cat "$DIR/initiator.$run"; fail "no workload"; }
        sleep 1
        tell "working.$run"
        wait "$process" && status=0 || status=$?
        say "run $run ends with status $status"
        cat "$DIR/initiator.$run"
        grep -q '^10.9.0.2@o2ib .* nothing$' "$DIR/initiator.$run" || fail "it has something left over"
        tell "done.$run"
        if [ "$run" = 2 ]; then
            [ "$status" -eq 5 ] || fail "a cut cable goes unnoticed"
            await up 60
        fi
        until_true 60 ping_target || fail "the target does not answer after run $run"
    done
    tell done.3
fi
