# The driver beside raw calls of libibverbs, and registration by window beside ibv_reg_mr: in turns, in one process.
one_guest
O2POLL_VERBS_DEVICE=rxe0 "$BENCH" verbs/device --json "$DIR/bench.json"
