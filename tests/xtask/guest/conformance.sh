# The laws of dataplane::nic on rxe0.
one_guest
O2POLL_VERBS_DEVICE=rxe0 "$CONFORMANCE" --test-threads=1 rxe
