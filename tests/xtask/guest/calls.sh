# System calls of a polling core in steady state: one write to the device for each doorbell, and yields.
one_guest
node_file 10
start_target target
strace -f -c -o "$DIR/strace" "$O2POLL" run "$DIR/pair.toml" --node 10.9.0.2@o2ib --json "$DIR/report.json" ||
    fail "status $?"
cat "$DIR/strace"
stop_target target
