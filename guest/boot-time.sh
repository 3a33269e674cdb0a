#!/bin/bash
# Boots an image until its agent is about to run, and prints how long that took. Nothing of the image changes.
#   guest/boot-time.sh IMAGE SECONDS_MAX
set -euo pipefail

image=$1
seconds_max=$2
work=$(mktemp -d)
machine=
trap '[[ -z $machine ]] || kill "$machine" 2>/dev/null; rm -rf "$work"' EXIT
command -v qemu-system-x86_64 >/dev/null || {
    echo "guest: no qemu-system-x86_64: run make setup" >&2
    exit 1
}

begin=$(date +%s%N)
qemu-system-x86_64 -nodefaults -no-user-config -display none -machine q35,accel=tcg -cpu max -m 512 -smp 1 -no-reboot \
    -kernel "$image/vmlinuz" -initrd "$image/initrd" -append "console=ttyS0 root=/dev/vda quiet" \
    -drive "file=$image/root.img,format=raw,if=virtio,snapshot=on" -device virtio-rng-pci \
    -serial "file:$work/console" >"$work/qemu" 2>&1 &
machine=$!
for ((tries = 0; tries < seconds_max * 20; tries++)); do
    if grep -q 'onecopy-guest: .* up' "$work/console" 2>/dev/null; then
        echo "guest: boots in $((($(date +%s%N) - begin) / 1000000)) ms"
        exit 0
    fi
    kill -0 "$machine" 2>/dev/null || break
    sleep 0.05
done
cat "$work/qemu" "$work/console" >&2 || true
echo "guest: the image did not come up within $seconds_max s (see above)" >&2
exit 1
