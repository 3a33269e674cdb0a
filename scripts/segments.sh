#!/bin/bash
# Removes what killed servers leave in the kernel: the small System V segment by which PostgreSQL notices a second postmaster. A server that
# starts again removes its own; those of servers whose directory is gone stay, and the kernel has room for 4096.
set -euo pipefail

# Of the size of PostgreSQL's header alone, and attached by nobody: a server that lives is attached, one that is started anew makes another.
HEADER_BYTES=56

ipcs -m | awk -v size="$HEADER_BYTES" '$5 == size && $6 == 0 { print $2 }' | while read -r segment; do
    # Somebody else's stays.
    ipcrm -m "$segment" 2>/dev/null || true
done
