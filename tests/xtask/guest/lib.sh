# What every case has at hand. Sourced in a guest, with
#   GUEST   a or b
#   DIR     the folder that the host and all guests of a case share
# Output goes to DIR/GUEST.output by itself.

say() {
    printf '[%8.2f] %s\n' "$(cut -d' ' -f1 /proc/uptime)" "$*"
}

fail() {
    say "FAILED: $*"
    exit 1
}

# until_true SECONDS COMMAND...: tries every 100 ms. The time that the command takes counts.
until_true() {
    local end=$((SECONDS + $1))
    shift
    while ! "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

# await NAME SECONDS: until another guest, or another process, has told NAME.
await() {
    until_true "$2" test -e "$DIR/told.$1" || fail "nobody told '$1' within $2 s"
}

tell() {
    : >"$DIR/told.$1"
}

port_is_active() {
    grep -q ACTIVE /sys/class/infiniband/rxe0/ports/1/state
}

# rxe0 over a network device.
soft_roce() {
    modprobe -a rdma_rxe rdma_ucm ib_uverbs
    rdma link add rxe0 type rxe netdev "$1"
    until_true 10 port_is_active || fail "rxe0 does not become active"
}

# One guest that speaks to itself: rxe0 over one end of a veth pair, with two addresses.
one_guest() {
    modprobe veth
    ip link set lo up
    ip link add v0 mtu 9000 type veth peer name v1 mtu 9000
    ip addr add 10.9.0.1/24 dev v0
    ip addr add 10.9.0.2/24 dev v0
    ip link set v0 up
    ip link set v1 up
    soft_roce v0
}

# The name of the card on the wire, once udev, if the host has it, is done with renaming.
card() {
    local mac=52:54:00:00:00:6
    modprobe virtio_net
    until_true 20 grep -qs "^$mac" /sys/class/net/*/address || fail "the guest has no card"
    if command -v udevadm >/dev/null; then
        udevadm settle --timeout=20 || true
    fi
    grep -ls "^$mac" /sys/class/net/*/address | cut -d/ -f5
}

# Two guests on one wire: rxe0 over CARD, or where it is "bridged", in guest a, over one end of a veth pair whose
# other end is bridged with CARD: then br0 can be set down and rxe0 keeps its routes, as with a cable that is cut
# further away. Guest a is 10.9.0.1, b is 10.9.0.2; they wait for each other. A frame has room for a whole message of
# o2iblnd.
two_guests() {
    local other netdev
    CARD=$(card)
    netdev=$CARD
    ip link set lo up
    ip link set "$CARD" mtu 9000
    if [ "$GUEST" = a ] && [ "${1:-}" = bridged ]; then
        modprobe -a veth bridge
        ip link add v0 mtu 9000 address 52:54:00:00:01:01 type veth peer name v1 mtu 9000 address 52:54:00:00:01:02
        ip link add br0 mtu 9000 address 52:54:00:00:01:03 type bridge forward_delay 0
        ip link set "$CARD" master br0
        # Packets that two processors pass on must not overtake each other.
        echo 1 >/sys/class/net/v0/queues/rx-0/rps_cpus
        echo 1 >/sys/class/net/v1/queues/rx-0/rps_cpus
        ip link set v1 master br0 up
        # The bridge would answer for v0's address with its own, and what is sent there never gets to rxe0.
        echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
        ip link set br0 up
        netdev=v0
        ip link set "$CARD" up
    fi
    case "$GUEST" in
    a)
        ip addr add 10.9.0.1/24 dev "$netdev"
        other=10.9.0.2
        ;;
    b)
        ip addr add 10.9.0.2/24 dev "$netdev"
        other=10.9.0.1
        ;;
    esac
    ip link set "$netdev" up
    soft_roce "$netdev"
    until_true 120 busybox ping -c 1 -W 1 "$other" || fail "$other does not answer"
    tell "$GUEST-is-up"
    await a-is-up 120
    await b-is-up 120
}

# set_cable off|on: the host pulls this guest's cable, or plugs it in again: CARD has no carrier, and frames are gone either way.
set_cable() {
    echo "$1" >"$DIR/$GUEST.cable"
    until_true 30 grep -qx "$1" "$DIR/$GUEST.cable.is" || fail "the host does not set the cable $1"
}

# Captures RoCE on CARD until capture_stop, which leaves DIR/wire.pcap. It is written to memory first: the shared
# folder is too slow, and frames would be missing.
capture_start() {
    tcpdump -i "$CARD" -B 16384 -w /run/wire.pcap 'udp port 4791' 2>"$DIR/tcpdump" &
    CAPTURE=$!
    until_true 20 grep -q 'listening on' "$DIR/tcpdump" || fail "tcpdump does not start"
}

capture_stop() {
    sleep 2
    kill -INT "$CAPTURE"
    wait "$CAPTURE" || true
    cat "$DIR/tcpdump"
    grep -q '^0 packets dropped' "$DIR/tcpdump" || fail "the capture is not complete"
    cp /run/wire.pcap "$DIR/wire.pcap"
}

# node_file SECONDS TIMEOUT RECONNECTS VERIFY: writes FILE, in which 10.9.0.1 exports, and 10.9.0.2 copies and works for
# SECONDS. The file is the same in every guest.
FILE=/run/pair.toml
node_file() {
    seq 1 230000 >/run/file.bin
    truncate -s 1500000 /run/file.bin
    cat >"$FILE" <<END
device = { verbs = "rxe0" }
memory = { huge_pages = "off", mlock = "try" }
tunables = { timeout = "${2:-20}s", abandon_limit = "${2:-20}s", reconnects = ${3:-20}, idle = "yield" }

[[node]]
nid = "10.9.0.1@o2ib"
export = [
    { name = "file", portal = 50, match_bits = 0x1, file = "file.bin" },
    { name = "copy", portal = 51, match_bits = 0x100, size = "2 MiB", writable = true },
    { name = "scratch", portal = 52, match_bits = 0x200, size = "4 MiB", writable = true },
]

[[node]]
nid = "10.9.0.2@o2ib"

[node.copy]
peer = "10.9.0.1@o2ib"
file = "file"
into = "copy"

[node.workload]
peer = "10.9.0.1@o2ib"
region = "scratch"
sizes = ["512 B", "8 KiB", "64 KiB", "1 MiB"]
in_flight = 4
duration = "${1:-2}s"
verify = ${4:-true}
END
}

# Starts the node that exports; its process is TARGET, its output DIR/NAME, its report DIR/NAME.json.
start_target() {
    "$O2POLL" run "$FILE" --node 10.9.0.1@o2ib -v --json "$DIR/$1.json" >"$DIR/$1" 2>&1 &
    TARGET=$!
    until_true 60 grep -q ready "$DIR/$1" || { cat "$DIR/$1"; fail "the target does not listen"; }
}

# Ends it, and wants it to have nothing left over.
stop_target() {
    kill -INT "$TARGET"
    wait "$TARGET" || { cat "$DIR/$1"; fail "the target ends with status $?"; }
}

# initiator SECONDS NAME: in the foreground, for so long at most; its report is DIR/NAME.json.
initiator() {
    timeout "${1:-100}" "$O2POLL" run "$FILE" --node 10.9.0.2@o2ib -v ${2:+--json "$DIR/$2.json"}
}

# account TARGET INITIATOR... [/ INITIATOR...]: has the host hold the reports of these against each other. Each transfer of an
# initiator must have ended once, and TARGET must have served those that ended well and no more than were asked for. Behind the
# slash: who has had to do with other lives of the target as well, or ? for others without a report. - for TARGET: it has none.
account() {
    echo "$*" >>"$DIR/accounts"
}

ping_target() {
    timeout 40 "$O2POLL" ping 10.9.0.1@o2ib --from 10.9.0.2@o2ib --timeout 20s "$@"
}

# What the kernel holds of processes: everything but its own management queue pair.
resources() {
    rdma resource show rxe0
}

gone_within() {
    until_true "$2" sh -c "! kill -0 $1"
}
