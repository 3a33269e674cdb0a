#!/bin/bash
# Runs a command whose temporary files lie on a file system of its own, made for it and gone afterwards.
#   scripts/on-test-disk.sh COMMAND [ARGUMENT]...
#
# Tests make and remove some hundred thousand small files. On a machine's own file system that may cost more than all
# the rest: ext4 without a journal searches for an inode that was not freed in the last minutes (recently_deleted in
# fs/ext4/ialloc.c), which took a quarter of the processor time of a whole run. ONECOPY_TEST_DISK=off leaves them there,
# as does an account that may not mount.
set -euo pipefail

if [[ ${ONECOPY_TEST_DISK:-on} == off ]] || ((EUID != 0)); then
    exec "$@"
fi

# Sparse. What tests have at one time is less than the second figure.
SIZE_MB=24576
NEEDED_MB=8192

fail() {
    echo "test disk: $*; ONECOPY_TEST_DISK=off runs without one" >&2
    exit 1
}

# Memory is what some of the tests measure.
above=${TMPDIR:-/tmp}
if [[ $(stat --file-system --format=%T "$above") == tmpfs ]]; then
    above=/var/tmp
fi

# Ends what still works in it, takes it away.
remove() {
    local place=$1 mounted
    # What tests have left mounted in it comes first: the deepest.
    for mounted in $(findmnt --list --noheadings --output TARGET | { grep "^$place\(/\|$\)" || true; } | sort -r); do
        fuser --kill --silent --ismountpoint --mount "$mounted" 2>/dev/null || true
        for _ in {1..50}; do
            if umount "$mounted" 2>/dev/null; then
                break
            fi
            sleep 0.1
        done
        if mountpoint --quiet "$mounted"; then
            echo "test disk: $mounted is in use by $(fuser --mount "$mounted" 2>/dev/null | xargs)" >&2
            umount --lazy "$mounted"
        fi
    done
    rmdir "$place" 2>/dev/null || true
    rm -f "$place.image"
}

# Those of runs that were killed: nobody holds them.
for image in "$above"/ct.*.image; do
    if [[ -e $image ]] && flock --nonblock --exclusive "$image" true; then
        remove "${image%.image}"
    fi
done

available_mb=$(df --output=avail --block-size=1M "$above" | tail -n 1)
((available_mb >= NEEDED_MB)) || fail "$above has $available_mb MB, tests need $NEEDED_MB MB"

# Short: the path of a Unix socket has at most 107 bytes.
place=$(mktemp -d "$above/ct.XXXXXX")
trap 'remove "$place"' EXIT
# An interrupted command ends first, then this.
trap 'exit 130' INT TERM

exec {held}>"$place.image"
flock --exclusive "$held"
truncate --size="${SIZE_MB}M" "$place.image"
mkfs.ext4 -q -E lazy_itable_init=1,lazy_journal_init=1 "$place.image"
mount -o loop,discard "$place.image" "$place" || fail "a loop device cannot be mounted"
chmod 1777 "$place"
rmdir "$place/lost+found"

# What it leaves running does not hold the image.
TMPDIR=$place "$@" {held}>&-
