# The guest has a device, and its user space finds it: what all other cases stand on.
one_guest
ibv_devices | tee "$DIR/devices"
grep -qw rxe0 "$DIR/devices" || fail "ibv_devices does not list rxe0"
ibv_devinfo -d rxe0 -v >"$DIR/devinfo"
grep -q PORT_ACTIVE "$DIR/devinfo" || fail "rxe0 is not active"
