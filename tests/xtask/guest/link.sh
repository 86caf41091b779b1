# A cable that is cut for 5 s, a peer that is killed and comes back, and a cable that is cut for longer than every
# timeout, while the initiator may connect again and while it may not. Transfers end with their data or with an error that
# has a name; whoever lives serves and asks again.
#
# After 5 s the device's own retries should carry on, and mostly do. Where acknowledgements were lost soon after a NAK,
# rxe's retransmission timer (Linux 6.1) never fires again: then the nodes' own timeouts end the transfers.
two_guests bridged
if [ "$GUEST" = a ]; then
    before=$(resources)
    node_file 1 15
    start_target target.1
    tell serving
    await cut.1 120
    say "cut for 5 s"
    ip link set "$CARD" down
    sleep 5
    ip link set "$CARD" up
    await kill 120
    say "the target is killed"
    kill -KILL "$TARGET"
    gone_within "$TARGET" 5 || fail "the killed target is there after 5 s"
    node_file 1 5
    start_target target.2
    tell again
    await cut.2 120
    say "cut for longer than every timeout"
    ip link set "$CARD" down
    await noticed 120
    until_true 60 grep -q 'the connection with 10.9.0.2@o2ib has ended' "$DIR/target.2" ||
        { cat "$DIR/target.2"; fail "the target does not notice"; }
    say "mended; the same processes go on"
    ip link set "$CARD" up
    await cut.3 200
    say "cut for good"
    ip link set "$CARD" down
    await ended 120
    ip link set "$CARD" up
    until_true 30 busybox ping -c 1 -W 1 10.9.0.2 || fail "the wire does not come back"
    tell mended
    await done 120
    stop_target target.2
    cat "$DIR/target.2"
    say "REMARK: $(cat "$DIR/remark")"
    after=$(resources)
else
    before=$(resources)
    # run NAME SECONDS TIMEOUT RECONNECTS VERIFY: an initiator in the background, until it is at its workload.
    run() {
        node_file "$2" "$3" "$4" "$5"
        initiator 150 >"$DIR/initiator.$1" 2>&1 &
        process=$!
        until_true 100 grep -q workload "$DIR/initiator.$1" || { cat "$DIR/initiator.$1"; fail "no workload"; }
        sleep 2
    }
    notices() {
        until_true 60 grep -q 'the connection with 10.9.0.1@o2ib has ended: ' "$DIR/initiator.$1" ||
            { cat "$DIR/initiator.$1"; fail "it does not notice"; }
    }
    # ends NAME STATUS...: how it ends, with errors that have names where it is not well, and with nothing left over.
    ends() {
        local name=$1
        shift
        wait "$process" && status=0 || status=$?
        say "run $name ends with status $status"
        cat "$DIR/initiator.$name"
        [[ " $* " = *" $status "* ]] || fail "it was to end with $*"
        if [ "$status" = 5 ]; then
            grep -qE 'FAILED: .*( ended: | the first: )' "$DIR/initiator.$name" || fail "it does not say why"
        fi
        grep -q '^10.9.0.2@o2ib .* 0 *nothing$' "$DIR/initiator.$name" || fail "it has a key or something else left over"
    }
    await serving 120
    run cut 10 15 0 true
    tell cut.1
    ends cut 0 5
    echo "after the cut of 5 s status $status" >"$DIR/remark"
    # What was written died with the target. It connects again; transfers may still time out, since 5 s are less than rxe's
    # retransmission sometimes takes here (a queue pair made anew does no better than one that was reset).
    run killed 50 5 60 false
    tell kill
    notices killed
    ends killed 0 5
    await again 120
    run long 20 5 60 true
    tell cut.2
    notices long
    tell noticed
    ends long 0 5
    grep -q "10.9.0.2@o2ib made [0-9]* lost connections\? again" "$DIR/initiator.killed" || fail "it has not connected again"
    run last 5 15 0 true
    sleep 1
    tell cut.3
    ends last 5
    tell ended
    await mended 60
    # The manager of a kernel sends a REQ that was lost again after more than four seconds.
    run mended 1 20 60 true
    ends mended 0
    tell done
    after=$(resources)
fi
say "before: $before; after: $after"
[ "$before" = "$after" ] || fail "the kernel still holds something"
