# A port that goes down, a device that is taken away, rights that are missing: processes say so in plain words, and live on
# or end in order.
one_guest
says() {
    grep -q "$1" "$2" || { cat "$2"; fail "$2 does not say '$1'"; }
}

say "the port goes down and comes back; rxe speaks to itself meanwhile"
node_file 20 30
start_target target.port
initiator 100 initiator.port >"$DIR/initiator.port" 2>&1 &
INITIATOR=$!
until_true 60 grep -q workload "$DIR/initiator.port" || { cat "$DIR/initiator.port"; fail "no workload"; }
ip link set v1 down
for who in target initiator; do
    until_true 20 grep -q 'rxe0: .*port error' "$DIR/$who.port" || { cat "$DIR/$who.port"; fail "the $who is not told"; }
done
port_is_active && fail "the port does not go down"
ip link set v1 up
until_true 20 port_is_active || fail "the port does not come back"
wait "$INITIATOR" || { cat "$DIR/initiator.port"; fail "the initiator ends with status $?"; }
ping_target
stop_target target.port
for who in target initiator; do
    says 'rxe0: .*port active' "$DIR/$who.port"
done

say "the device is taken away"
node_file 60 10
start_target target.removed
initiator 100 initiator.removed >"$DIR/initiator.removed" 2>&1 &
INITIATOR=$!
until_true 60 grep -q workload "$DIR/initiator.removed" || { cat "$DIR/initiator.removed"; fail "no workload"; }
sleep 1
rdma link delete rxe0 &
REMOVAL=$!
gone_within "$REMOVAL" 30 || fail "the removal waits: somebody holds the device"
wait "$REMOVAL" || fail "rdma link delete fails"
for who in target initiator; do
    case $who in target) wait "$TARGET" ;; initiator) wait "$INITIATOR" ;; esac && status=0 || status=$?
    say "the $who ended with status $status"
    cat "$DIR/$who.removed"
    [ "$status" -eq 5 ] || fail "status 5 says that a connection failed"
    says 'FAILED: the device rxe0 is being removed' "$DIR/$who.removed"
    says '^10.9.0..@o2ib .* nothing$' "$DIR/$who.removed"
done
# What was under way ends with its data, or says why not.
says '^FAILED: .* the first: \|^interrupted: ' "$DIR/initiator.removed"

account target.port initiator.port / '?'
account target.removed initiator.removed

say "it is back"
soft_roce v0
node_file 1 20
start_target target.back
initiator >"$DIR/initiator.back" 2>&1 || { cat "$DIR/initiator.back"; fail "the initiator ends with status $?"; }

say "rights are missing"
# refused TEXT COMMAND...: it does not start, and says why.
refused() {
    local text=$1
    shift
    "$@" >"$DIR/refused" 2>&1 && status=0 || status=$?
    cat "$DIR/refused"
    [ "$status" -eq 3 ] || fail "status 3 says that it could not start, not $status"
    says "$text" "$DIR/refused"
}
nobody() {
    setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all "$@"
}
refused 'below 1024 need CAP_NET_BIND_SERVICE' nobody "$O2POLL" run "$FILE" --node 10.9.0.2@o2ib
# It asks from another port, which this target does not mind.
nobody "$O2POLL" ping 10.9.0.1@o2ib --from 10.9.0.2@o2ib --timeout 30s
refused 'limit of locked memory' nobody prlimit --memlock=65536:65536 "$O2POLL" ping 10.9.0.1@o2ib --from 10.9.0.2@o2ib
chmod 600 /dev/infiniband/rdma_cm
refused 'Permission denied.*/dev/infiniband/rdma_cm' nobody "$O2POLL" ping 10.9.0.1@o2ib --from 10.9.0.2@o2ib
chmod 600 /dev/infiniband/uverbs0
refused 'Permission denied.*/dev/infiniband' nobody "$O2POLL" ping 10.9.0.1@o2ib --from 10.9.0.2@o2ib
stop_target target.back
