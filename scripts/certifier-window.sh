#!/bin/bash
# Shows the window of PostgreSQL's certifier (docs/decisions/0018): three serializable transactions on one plain server
# that no serial order explains all commit, when one of them is held between being visible and being known as committed.
#
#   scripts/certifier-window.sh [BINARIES]      e.g. /usr/lib/postgresql/15/bin; needs gdb, root and postgres
#
# Ends with 0 when the window is there, with 1 when PostgreSQL has refused one of the three.
set -euo pipefail

binaries=${1:-/usr/lib/postgresql/15/bin}
command -v gdb >/dev/null || { echo "certifier-window: gdb is missing: apt-get install gdb" >&2; exit 2; }
home=$(mktemp -d)
chown postgres "$home"
as_postgres() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
end() {
    as_postgres "$binaries/pg_ctl" -D "$home/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$home"
}
trap end EXIT

cd "$home"
as_postgres "$binaries/initdb" -D "$home/data" -A trust >/dev/null
as_postgres "$binaries/pg_ctl" -D "$home/data" -l "$home/log" -w \
    -o "-c listen_addresses= -c unix_socket_directories=$home -c autovacuum=off" start >/dev/null

client() { "$binaries/psql" -h "$home" -U postgres -X -q -A -t postgres 2>&1; }
# One statement in one of the sessions; waits for its answer.
ask() {
    local session=$1 to=${1}_to from=${1}_from answer="" line
    printf '%s\n\\echo END\n' "$2" >&"${!to}"
    while read -r line <&"${!from}" && [ "$line" != END ]; do answer+="$line"; done
    echo "$session: $2 -> ${answer:-done}" >&2
    echo "$answer"
}

echo "CREATE TABLE items (id int PRIMARY KEY, v text);" \
    "INSERT INTO items SELECT n, 'old' FROM generate_series(1, 5000) n" | client
# bash warns of a second coprocess; `ask` finds the descriptors by their names.
{
    coproc pivot { client; }
    # shellcheck disable=SC2034
    exec {pivot_to}>&"${pivot[1]}" {pivot_from}<&"${pivot[0]}"
    coproc third { client; }
    exec {third_to}>&"${third[1]}" {third_from}<&"${third[0]}"
    coproc reader { client; }
    # shellcheck disable=SC2034
    exec {reader_to}>&"${reader[1]}" {reader_from}<&"${reader[0]}"
} 2>/dev/null

begin="BEGIN ISOLATION LEVEL SERIALIZABLE;"
ask pivot "$begin SELECT v FROM items WHERE id = 4000;" >/dev/null
ask pivot "UPDATE items SET v = 'new' WHERE id = 1;" >/dev/null
ask third "$begin UPDATE items SET v = 'new' WHERE id = 4000;" >/dev/null
process=$(ask third "SELECT pg_backend_pid();")
# Held where it is visible to new snapshots and the certifier does not know yet that it has committed.
gdb -q -nx -batch -p "$process" -ex "handle SIGUSR1 nostop noprint pass" -ex "break ReleasePredicateLocks" \
    -ex "shell touch $home/attached" -ex continue -ex "shell touch $home/held" \
    -ex "shell while [ ! -e $home/go ]; do sleep 0.1; done" -ex delete -ex detach >"$home/gdb" 2>&1 &
wait_for() { for _ in {1..600}; do [ -e "$1" ] && return; sleep 0.1; done; cat "$home/gdb" >&2; exit 2; }
wait_for "$home/attached"
sleep 1
printf 'COMMIT;\n\\echo END\n' >&"$third_to"
wait_for "$home/held"
sees_third=$(ask reader "$begin SELECT v FROM items WHERE id = 4000;")
committed=$(ask pivot "COMMIT;")
touch "$home/go"
while read -r line <&"$third_from" && [ "$line" != END ]; do committed+="$line"; done
sees_pivot=$(ask reader "SELECT v FROM items WHERE id = 1;")
committed+=$(ask reader "COMMIT;")

if [ "$sees_third/$sees_pivot/$committed" = "new/old/" ]; then
    echo "$("$binaries/postgres" --version): the reader came after the third and before the pivot," \
        "the pivot before the third: all committed"
else
    echo "$("$binaries/postgres" --version): no such order was committed: $sees_third/$sees_pivot/$committed"
    exit 1
fi
