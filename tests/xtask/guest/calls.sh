# What the program asks of the kernel, and what each transfer costs, one at a time: beside the same jobs on the software
# device. The host compares.
one_guest
seq 1 230000 >/run/file.bin
# job DEVICE PUTS: writes FILE, with both nodes in one process.
job() {
    cat >"$FILE" <<END
device = $1
memory = { huge_pages = "off", mlock = "try" }
tunables = { timeout = "20s", idle = "yield" }

[[node]]
nid = "10.9.0.1@o2ib"
extensions = { send_with_invalidate = false }
export = [
    { name = "file", portal = 50, match_bits = 0x1, file = "file.bin" },
    { name = "copy", portal = 51, match_bits = 0x100, size = "2 MiB", writable = true },
    { name = "scratch", portal = 52, match_bits = 0x200, size = "4 MiB", writable = true },
]

[[node]]
nid = "10.9.0.2@o2ib"
extensions = { send_with_invalidate = false }

[node.copy]
peer = "10.9.0.1@o2ib"
file = "file"
into = "copy"
transfer = "64 KiB"
in_flight = 1

[node.workload]
peer = "10.9.0.1@o2ib"
region = "scratch"
sizes = ["512 B"]
put = $2
in_flight = 1
duration = "2s"
END
}
for puts in 0.0 1.0; do
    job '{ soft = { profile = "rxe" } }' "$puts"
    timeout 100 "$O2POLL" run "$FILE" --json "$DIR/soft.$puts.json"
    job '{ verbs = "rxe0" }' "$puts"
    mkdir -p "/run/calls.$puts"
    # sched_yield is let pass: an idle core gives way all the time, and strace would see nothing else.
    timeout 150 strace -ff --seccomp-bpf -e 'trace=!sched_yield' -ttt -s 4 -o "/run/calls.$puts/thread" \
        "$O2POLL" run "$FILE" --json "$DIR/verbs.$puts.json"
    cp -r "/run/calls.$puts" "$DIR"
done
