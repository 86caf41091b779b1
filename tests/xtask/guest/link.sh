# What happens to a wire and to a peer while an initiator works: packets are lost, the cable is pulled for 5 s and cut for longer than every
# timeout, the peer is killed and comes back. The same processes go on: data flows again, each transfer ends once, with its data
# or with an error that has a name, as both sides' reports must say, and nobody has a key left over. Without the permission to
# connect again the cut is an error with a name.
#
# The short cut may cost the connection as well: the nodes' timeout is as long as it, and a device that has sent a request again
# for that long in vain says so (IBV_WC_RETRY_EXC_ERR).
#
# The cable of guest b is pulled (QEMU's set_link), and in guest a the bridge is set down: it drops all that comes, as a cable does
# that is cut further away. No card is set down: QEMU would hold what comes for it, and then take nothing more from the other
# guest, and rxe destroys no queue pair (50 s long, then with a warning) of which a packet is still queued; and where rxe0 stands
# on it, rxe takes in nothing of a connection manager any more after its route was gone.
two_guests bridged

# How often FILE says that a connection has ended.
ends_in() {
    grep -c 'the connection with .* has ended: ' "$1" || true
}

more_ends_than() {
    [ "$(ends_in "$2")" -gt "$1" ]
}

cut_cable() {
    ip link set br0 down
}

mend_cable() {
    ip link set br0 up
}

# clean NAME: the node of guest a has nothing left over.
clean() {
    cat "$DIR/$1"
    grep -q '^10.9.0.1@o2ib .* 0 *nothing$' "$DIR/$1" || fail "$1 has a key or something else left over"
}

# One packet in a hundred is lost, either way; behind some of them windows are being bound.
lose_packets() {
    modprobe sch_netem
    tc qdisc add dev "$CARD" root netem loss 1%
    tc qdisc add dev v1 root netem loss 1%
}

# counts DEV: packets that it has sent since lose_packets, and packets that were dropped there.
counts() {
    tc -s qdisc show dev "$1" | sed -n 's/^ *Sent .* \([0-9]*\) pkt (dropped \([0-9]*\),.*/\1 \2/p'
}

# enough_are_lost: either way some of a thousand and more, of which 1 % is 10.
enough_are_lost() {
    local dev sent dropped
    for dev in "$CARD" v1; do
        read -r sent dropped < <(counts "$dev") || return 1
        [ "$sent" -ge 1000 ] && [ "$dropped" -gt 0 ] || return 1
    done
}

lose_none() {
    until_true 60 enough_are_lost || {
        tc -s qdisc
        fail "no packets were lost"
    }
    say "packets that were sent and that were lost: $(counts "$CARD") to b, $(counts v1) from it"
    tc qdisc del dev "$CARD" root
    tc qdisc del dev v1 root
}

if [ "$GUEST" = a ]; then
    before=$(resources)
    node_file 1 5 60
    start_target target.1
    tell serving
    await lossy 200
    say "packets are lost"
    lose_packets
    tell lossy.now
    await lossy.over 120
    lose_none
    tell lossless
    await cut.1 200
    say "cut for longer than every timeout"
    ended=$(ends_in "$DIR/target.1")
    cut_cable
    until_true 90 more_ends_than "$ended" "$DIR/target.1" || { cat "$DIR/target.1"; fail "the target does not notice"; }
    await noticed 120
    mend_cable
    say "mended"
    tell mended.1
    await worked 120
    stop_target target.1
    clean target.1
    account target.1 initiator.cuts
    start_target target.2
    tell second
    await kill 200
    say "the target is killed"
    kill -KILL "$TARGET"
    gone_within "$TARGET" 5 || fail "the killed target is there after 5 s"
    start_target target.3
    tell again
    await cut.2 200
    say "cut for good"
    cut_cable
    await ended 120
    mend_cable
    tell mended.2
    await done 200
    stop_target target.3
    clean target.3
    account target.3 initiator.last initiator.mended / initiator.killed
    [ ! -e "$DIR/remark" ] || say "REMARK: $(tr -d '\n' <"$DIR/remark")"
    after=$(resources)
else
    before=$(resources)
    # run NAME SECONDS TIMEOUT RECONNECTS VERIFY: an initiator in the background, until it is at its workload.
    run() {
        OUTPUT="$DIR/initiator.$1"
        node_file "$2" "$3" "$4" "$5"
        "$O2POLL" run "$FILE" --node 10.9.0.2@o2ib -v --json "$OUTPUT.json" >"$OUTPUT" 2>&1 &
        process=$!
        until_true 100 grep -q ': workload$' "$OUTPUT" || { cat "$OUTPUT"; fail "no workload"; }
    }
    notices() {
        until_true 90 more_ends_than "$1" "$OUTPUT" || { cat "$OUTPUT"; fail "the initiator does not notice"; }
    }
    received() {
        cat /sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts
    }
    more_received_than() {
        [ "$(received)" -gt "$1" ]
    }
    # Data, and not only what asks for connections.
    flows() {
        local start=$SECONDS
        until_true 60 more_received_than $(($(received) + 300)) || { cat "$OUTPUT"; fail "nothing flows $*"; }
        say "data flows $* within $((SECONDS - start)) s"
    }
    # ends STATUS...: how the initiator ends, with errors that have names where it is not well, and with nothing left over.
    ends() {
        wait "$process" && status=0 || status=$?
        say "$OUTPUT ends with status $status"
        cat "$OUTPUT"
        [[ " $* " = *" $status "* ]] || fail "it was to end with $*"
        if [ "$status" = 5 ]; then
            grep -qE 'FAILED: .*( ended: | the first: )' "$OUTPUT" || fail "it does not say why"
        fi
        grep -q '^10.9.0.2@o2ib .* 0 *nothing$' "$OUTPUT" || fail "it has a key or something else left over"
    }
    compared() {
        grep -q '[1-9][0-9]* GETs compared, ok' "$OUTPUT" || fail "nothing was compared"
    }
    made_again() {
        grep -q '10.9.0.2@o2ib made [0-9]* lost connections\? again' "$OUTPUT" || fail "it has not connected again"
    }
    await serving 120
    run cuts 400 5 60 true
    flows "at first"
    tell lossy
    await lossy.now 20
    sleep 5
    flows "while packets are lost"
    tell lossy.over
    await lossless 90
    [ "$(ends_in "$OUTPUT")" = 0 ] || { cat "$OUTPUT"; fail "lost packets cost a connection"; }
    say "without a carrier for 5 s"
    set_cable off
    sleep 5
    set_cable on
    flows "after 5 s without a carrier"
    ended=$(ends_in "$OUTPUT")
    echo "connections lost by 5 s without a carrier: $ended" >"$DIR/remark"
    tell cut.1
    notices "$ended"
    tell noticed
    await mended.1 120
    flows "after a longer cut"
    kill -INT "$process"
    ends 7 5
    made_again
    compared
    tell worked
    await second 120

    run killed 400 5 60 true
    flows "from another target"
    tell kill
    notices 0
    await again 120
    flows "from the target that was started again"
    kill -INT "$process"
    ends 7 5
    made_again
    compared

    run last 400 5 0 true
    flows "once more"
    tell cut.2
    ends 5
    tell ended
    await mended.2 60
    run mended 1 20 60 true
    ends 0
    compared
    tell done
    after=$(resources)
fi
say "before: $before; after: $after"
[ "$before" = "$after" ] || fail "the kernel still holds something"
