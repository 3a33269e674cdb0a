#!/bin/bash
# Runs a command with PostgreSQL's programs of this major version first on the PATH: whoever asks for no version, as
# most tests do and `onecopy` does, takes that one.
#   scripts/on-version.sh MAJOR COMMAND [ARGUMENT...]
set -euo pipefail

major=${1:?usage: scripts/on-version.sh MAJOR COMMAND [ARGUMENT...]}
shift
unpacked=${ONECOPY_POSTGRESQL_ROOT:-/opt/onecopy}/postgresql-$major
[[ $major != 17 ]] || unpacked=${ONECOPY_POSTGRESQL_17:-$unpacked}
for bin in "$unpacked/bin" {"$unpacked",}/usr/lib/postgresql/"$major/bin"; do
    # It is asked which programs belong to it.
    if [[ -x $bin/postgres && $("$bin/pg_config" --bindir) == "$bin" ]]; then
        PATH=$bin:$PATH exec "$@"
    fi
done
echo "no PostgreSQL $major with pg_config in $unpacked or /usr/lib/postgresql: make setup" >&2
exit 1
