#!/bin/bash
# Runs a command whose temporary files lie on a file system of its own, made for it and gone afterwards.
#   scripts/on-test-disk.sh COMMAND [ARGUMENT]...
#
# Tests make and remove some hundred thousand small files. On a machine's own file system that may cost more than all the
# rest: ext4 without a journal searches for an inode that was not freed in the last minutes (recently_deleted in
# fs/ext4/ialloc.c), which took a quarter of the processor time of a whole run. ONECOPY_TEST_DISK=off leaves them there.
set -euo pipefail

# Sparse: what tests have at one time is a few gigabytes.
SIZE=${ONECOPY_TEST_DISK_SIZE:-24G}

if [[ ${ONECOPY_TEST_DISK:-on} == off ]] || ((EUID != 0)); then
    exec "$@"
fi

# Short: the path of a Unix socket has at most 107 bytes.
place=$(mktemp -d "${TMPDIR:-/tmp}/ct.XXXXXX")
image=$place.image

remove() {
    # What tests have left mounted in it comes first; processes that still work in it end with their tests.
    for _ in {1..50}; do
        if umount --recursive "$place" 2>/dev/null; then
            break
        fi
        sleep 0.1
    done
    if mountpoint --quiet "$place"; then
        echo "test disk: $place is in use: $(fuser --mount "$place" 2>/dev/null | xargs)" >&2
        umount --recursive --lazy "$place"
    fi
    rmdir "$place"
    rm -f "$image"
}
trap remove EXIT
# An interrupted command ends first, then this.
trap 'exit 130' INT TERM

truncate --size="$SIZE" "$image"
mkfs.ext4 -q -E lazy_itable_init=1,lazy_journal_init=1 "$image"
mount -o loop,discard "$image" "$place"
chmod 1777 "$place"
rmdir "$place/lost+found"

TMPDIR=$place "$@"
