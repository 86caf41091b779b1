# Connections that come and go leave nothing behind: 500 in one process under load, and a few whose process ends as well.
one_guest
ip addr add 10.9.0.3/24 dev v0
O2POLL_VERBS_DEVICE=rxe0 "$CYCLES" --nocapture
node_file 2
start_target target
ping_target
until_true 20 sh -c '[ "$(rdma resource show rxe0 | grep -o "cm_id [0-9]*")" = "cm_id 1" ]'
before=$(resources) files=$(ls "/proc/$TARGET/fd" | wc -l)
for _ in 1 2 3 4; do
    ping_target
done
until_true 20 sh -c '[ "$(rdma resource show rxe0 | grep -o "cm_id [0-9]*")" = "cm_id 1" ]'
after=$(resources) files_after=$(ls "/proc/$TARGET/fd" | wc -l)
say "before: $before, $files files; after: $after, $files_after files"
[ "$before" = "$after" ] || fail "the kernel holds more than before"
[ "$files" = "$files_after" ] || fail "the target has more files open than before"
stop_target target
