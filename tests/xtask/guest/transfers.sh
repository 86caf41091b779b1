# The transfer tests, two nodes in one process on rxe0; of random programs 24 each. What the program has is listed, so that a
# test that is not run is missed.
one_guest
"$TRANSFERS" --list rxe::
O2POLL_VERBS_DEVICE=rxe0 O2POLL_CASES=24 "$TRANSFERS" --test-threads=1 --show-output rxe::
