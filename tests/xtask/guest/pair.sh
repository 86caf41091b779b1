# Two processes do what the two nodes of the loopback file do in one.
one_guest
before=$(resources)
node_file 2
if ping_target >"$DIR/nobody" 2>&1; then fail "a ping where nobody listens succeeds"; fi
cat "$DIR/nobody"
grep -q 'nobody listens there' "$DIR/nobody" || fail "it does not say that nobody listens"
start_target target
ping_target --count 3
cd /run
timeout 60 "$O2POLL" get 10.9.0.1@o2ib 50:0x1 --from 10.9.0.2@o2ib -o got.bin
cmp file.bin got.bin
timeout 60 "$O2POLL" put file.bin 10.9.0.1@o2ib 51:0x100 --from 10.9.0.2@o2ib
timeout 60 "$O2POLL" get 10.9.0.1@o2ib 51:0x100 --from 10.9.0.2@o2ib --length 1500000 -o back.bin
cmp file.bin back.bin
say "lengths around the borders of a message, a page and a transfer"
for length in 1 3976 3977 4097 65537 1048576 1048577; do
    # The end of the file, so that no length finds what the one before has left.
    tail -c "$length" file.bin >part.bin
    timeout 60 "$O2POLL" put part.bin 10.9.0.1@o2ib 51:0x100 --from 10.9.0.2@o2ib >"$DIR/put" 2>&1 ||
        { cat "$DIR/put"; fail "put of $length bytes"; }
    timeout 60 "$O2POLL" get 10.9.0.1@o2ib 51:0x100 --from 10.9.0.2@o2ib --length "$length" -o back.bin >"$DIR/get" 2>&1 ||
        { cat "$DIR/get"; fail "get of $length bytes"; }
    cmp part.bin back.bin || fail "$length bytes come back changed"
done
say "the job"
initiator 100 initiator | tee "$DIR/initiator" || fail "the initiator ends with status $?"
[ "$(grep -c '^sha-256 .*: ok' "$DIR/initiator")" -eq 2 ] || fail "not both digests are right"
stop_target target
account target initiator / '?'
after=$(resources)
say "before: $before; after: $after"
[ "$before" = "$after" ] || fail "the kernel still holds something"
say "the job once more, by keys that cover what a node gives out"
sed -i -e 's/^memory = { /&exposure = "arena", /' -e 's/^tunables = { /&map_on_demand = 256, /' "$FILE"
start_target exposed
initiator 100 exposing | tee "$DIR/exposing" || fail "the initiator ends with status $?"
[ "$(grep -c '^sha-256 .*: ok' "$DIR/exposing")" -eq 2 ] || fail "not both digests are right"
stop_target exposed
account exposed exposing
for report in exposed exposing; do
    grep -q '"by_arena_key": *[1-9]' "$DIR/$report.json" || fail "$report: no peer wrote under the key of an arena"
done
after=$(resources)
[ "$before" = "$after" ] || fail "the kernel still holds something: before $before; after $after"
