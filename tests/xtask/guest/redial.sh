# A target that is killed and started again while a workload runs over two connections, on two cores of the initiator: the
# initiator connects again and ends well. Then a verified job with a target on two cores.
one_guest

# What the two nodes say, in a file: of the target, of the initiator, whether that compares, and its seconds.
several() {
    node_file "$4" 20 60 "$3"
    sed -i -e "s/^nid = \"10.9.0.1@o2ib\"/&\n$1/" -e "s/^nid = \"10.9.0.2@o2ib\"/&\n$2/" "$FILE"
}

# The copy would compare with what died with the target.
several 'conns_per_peer = 1' 'conns_per_peer = 2\ncores = [0, 1]' true 25
sed -i '/^\[node.copy\]/,/^$/d' "$FILE"
start_target target.1
initiator 200 initiator.1 >"$DIR/initiator.1" 2>&1 &
INITIATOR=$!
until_true 90 grep -q workload "$DIR/initiator.1" || { cat "$DIR/initiator.1"; fail "the workload does not begin"; }
sleep 3
say "the target is killed"
kill -KILL "$TARGET"
gone_within "$TARGET" 5 || fail "the killed target is there after 5 s"
start_target target.2
say "and started again"
wait "$INITIATOR" && status=0 || status=$?
cat "$DIR/initiator.1"
[ "$status" -eq 0 ] || fail "the initiator ended with status $status"
grep -q '10.9.0.2@o2ib made 2 lost connections again' "$DIR/initiator.1" || fail "not both connections came back"
grep -q 'transfers failed with their connection and were made again' "$DIR/initiator.1" || fail "nothing was repeated"
grep -q '[1-9][0-9]* GETs compared, ok' "$DIR/initiator.1" || fail "nothing was compared"
grep -q '^10.9.0.2@o2ib, second  *2 ' "$DIR/initiator.1" || fail "the second core had not two connections in all"
stop_target target.2
cat "$DIR/target.2"
account target.2 / initiator.1

say "a target on two cores, and every byte is compared"
several 'cores = [0, 1]' 'conns_per_peer = 2' true 4
start_target target.3
initiator 200 initiator.3 | tee "$DIR/initiator.3" || fail "the initiator ends with status $?"
[ "$(grep -c '^sha-256 .*: ok' "$DIR/initiator.3")" -eq 2 ] || fail "not both digests are right"
grep -q 'GETs compared, ok' "$DIR/initiator.3" || fail "not every GET is right"
stop_target target.3
cat "$DIR/target.3"
grep -q '^10.9.0.1@o2ib, second  *1 ' "$DIR/target.3" || fail "the second core has no connection"
account target.3 initiator.3
