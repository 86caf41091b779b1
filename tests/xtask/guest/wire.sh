# RoCE between two guests passes where tcpdump sees it.
two_guests
if [ "$GUEST" = a ]; then
    capture_start
    ibv_rc_pingpong -d rxe0 -g 1 -n 10 &
    until_true 20 sh -c 'ss -ltn | grep -q :18515' || fail "ibv_rc_pingpong does not listen"
    tell serving
    wait $!
    capture_stop
else
    await serving 60
    ibv_rc_pingpong -d rxe0 -g 1 -n 10 10.9.0.1
fi
