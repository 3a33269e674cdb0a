#!/bin/bash
# Removes what killed servers leave in memory. A server that starts again removes its own; those of servers whose
# directory is gone stay: the small System V segment by which PostgreSQL notices a second postmaster, of which the
# kernel has room for 4096, and the files of dynamic shared memory, 1 MiB each.
set -euo pipefail

# Of the size of PostgreSQL's header alone, and attached by nobody: a server that lives is attached, one that is started
# anew makes another.
HEADER_BYTES=56

ipcs -m | awk -v size="$HEADER_BYTES" '$5 == size && $6 == 0 { print $2 }' | while read -r segment; do
    # Somebody else's stays.
    ipcrm -m "$segment" 2>/dev/null || true
done

# A server that lives may have segments that no process has mapped at the moment, but it always has one that is mapped:
# nothing is removed while any server runs. Who is not root does not see everybody's.
if ((EUID == 0)); then
    # A process may end while its file is read.
    mapped=$({ cat /proc/[0-9]*/maps 2>/dev/null || true; } | grep -c '/dev/shm/PostgreSQL\.' || true)
    if [[ $mapped == 0 ]]; then
        find /dev/shm -maxdepth 1 -type f -name 'PostgreSQL.*' -mmin +1 -delete
    fi
fi
