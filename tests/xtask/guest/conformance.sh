# The guest has a device, its user space finds it, and the laws of dataplane::nic hold on it. What the program has is listed,
# so that a test that is not run is missed.
one_guest
ibv_devices | tee "$DIR/devices"
grep -qw rxe0 "$DIR/devices" || fail "ibv_devices does not list rxe0"
ibv_devinfo -d rxe0 -v >"$DIR/devinfo"
grep -q PORT_ACTIVE "$DIR/devinfo" || fail "rxe0 is not active"
"$CONFORMANCE" --list --skip card::
O2POLL_VERBS_DEVICE=rxe0 "$CONFORMANCE" --test-threads=1 --skip card::
