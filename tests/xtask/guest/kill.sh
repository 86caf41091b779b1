# kill -9 of either side: it is gone within 5 s, and the other side names what happened and goes on, or ends.
one_guest
before=$(resources)
node_file 60 10 3
say "a target is killed whose windows are bound to nothing"
start_target target.0
ping_target
kill -KILL "$TARGET"
gone_within "$TARGET" 5 || fail "the killed target is there after 5 s"
say "it is gone; now one at work"
start_target target.1
initiator 100 initiator.1 >"$DIR/initiator.1" 2>&1 &
INITIATOR=$!
until_true 60 grep -q workload "$DIR/initiator.1" || fail "the workload does not begin"
sleep 2
say "the target is killed"
kill -KILL "$TARGET"
gone_within "$TARGET" 5 || fail "the killed target is there after 5 s"
say "it is gone"
wait "$INITIATOR" && fail "the initiator ends well without a target" || status=$?
say "the initiator ended with status $status"
cat "$DIR/initiator.1"
[ "$status" -eq 5 ] || fail "status 5 says that a connection failed"
grep -q 'FAILED: .*10.9.0.1@o2ib' "$DIR/initiator.1" || fail "it does not name the connection"
grep -q '^10.9.0.2@o2ib .* nothing$' "$DIR/initiator.1" || fail "it has something left over"

say "another life of the target; now the initiator is killed"
# It must not end by itself before it is killed, nor before the target has noticed.
node_file 600 10 3
start_target target.2
"$O2POLL" run "$FILE" --node 10.9.0.2@o2ib -v >"$DIR/initiator.2" 2>&1 &
INITIATOR=$!
until_true 60 grep -q workload "$DIR/initiator.2" || { cat "$DIR/initiator.2"; fail "no workload"; }
sleep 2
kill -KILL "$INITIATOR"
gone_within "$INITIATOR" 5 || fail "the killed initiator is there after 5 s"
wait "$INITIATOR" && status=0 || status=$?
[ "$status" -eq 137 ] || fail "the initiator was not killed, it ended with status $status"
say "it is gone"
until_true 60 grep -q 'the connection with 10.9.0.2@o2ib has ended' "$DIR/target.2" ||
    { cat "$DIR/target.2"; fail "the target does not notice"; }
say "the same target serves the next one"
ping_target
node_file 2 10
initiator 100 initiator.3 | tee "$DIR/initiator.3" || fail "the third initiator ends with status $?"
stop_target target.2
cat "$DIR/target.2"
account - initiator.1
account target.2 initiator.3 / '?'
after=$(resources)
say "before: $before; after: $after"
[ "$before" = "$after" ] || fail "the kernel still holds something"
