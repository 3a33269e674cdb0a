#!/bin/bash
# Builds the extension for every PostgreSQL that is found and installs it there. Quick when nothing has changed. A
# server that runs meanwhile keeps the module that it has: files are replaced by renaming.
#   scripts/extension.sh           build and install
#   scripts/extension.sh --check   compile with more warnings, each an error, and install nothing
#   scripts/extension.sh --list    name the pg_config of each PostgreSQL that is found
set -euo pipefail
cd "$(dirname "$0")/.."

SEVENTEEN=${ONECOPY_POSTGRESQL_17:-/opt/onecopy/postgresql-17}
ROOT=${ONECOPY_POSTGRESQL_ROOT:-/opt/onecopy}
# Beyond what PostgreSQL itself is compiled with. Parameters that a hook does not need have their names all the same;
# PostgreSQL's own macros compare and initialize as they do.
WARNINGS=(-Werror -Wall -Wextra -Wshadow -Wstrict-prototypes -Wold-style-definition -Wundef -Wvla
    -Wdeclaration-after-statement -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers)

mode=${1:-}
case $mode in
    "" | --check | --list) ;;
    *)
        sed -n 's/^#   //p' "$0" >&2
        exit 2
        ;;
esac

# The pg_config of each supported PostgreSQL with what extensions are built with, each installation once.
find_all() {
    local candidates=(/usr/lib/postgresql/1[5-8]/bin/pg_config "$SEVENTEEN"/usr/lib/postgresql/17/bin/pg_config
        "$ROOT"/postgresql-1[5-8]/bin/pg_config "$(command -v pg_config || true)")
    local config libraries
    local -A seen=()
    for config in "${candidates[@]}"; do
        [[ -x $config && $("$config" --version) == "PostgreSQL 1"[5-8]* ]] || continue
        libraries=$("$config" --pkglibdir)
        [[ -z ${seen[$libraries]:-} ]] || continue
        [[ -e $("$config" --pgxs) && -e $("$config" --includedir-server)/postgres.h ]] || continue
        seen[$libraries]=1
        echo "$config"
    done
}

# What the module depends on besides what is in the sources: another compiler, another PostgreSQL, and a source that has
# come or gone begin anew.
fingerprint() {
    "$1" | sort
    cksum <"$("$1" --includedir-server)/pg_config.h"
    cc --version | head -n 1
    (cd "$source/src" && echo ./*.c)
}

# build DIRECTORY PG_CONFIG [MAKE'S ARGUMENTS]
build() {
    local directory=$1 config=$2
    shift 2
    if [[ $(fingerprint "$config") != "$(cat "$directory/fingerprint" 2>/dev/null)" ]]; then
        rm -rf "$directory"
        mkdir -p "$directory"
        fingerprint "$config" >"$directory/fingerprint"
    fi
    # Links, not make's search path: that would also find what somebody has built in the source directory for another
    # version.
    mkdir -p "$directory/src"
    ln -sf "$source"/Makefile "$source"/onecopy*.control "$source"/onecopy*.sql "$directory/"
    find "$directory/src" -type l -delete
    ln -s "$source"/src/*.[ch] "$directory/src/"
    make --silent --jobs 2 -C "$directory" PG_CONFIG="$config" "$@"
}

# install_changed STAGE: puts what differs to where it belongs; fails where it may not be written.
install_changed() {
    local stage=$1 file target
    while IFS= read -r -d '' file; do
        target=${file#"$stage"}
        cmp -s "$file" "$target" && continue
        "${as_root[@]}" install -D -m "$(stat -c %a "$file")" "$file" "$target.new" || return 1
        "${as_root[@]}" mv -f "$target.new" "$target" || return 1
        echo "extension: $target"
    done < <(find "$stage" -type f -print0)
}

mapfile -t configs < <(find_all)
if [[ $mode == --list ]]; then
    printf '%s\n' "${configs[@]}"
    exit 0
fi
if ((${#configs[@]} == 0)); then
    echo "extension: no PostgreSQL 15 to 18 with headers is found: run make setup" >&2
    exit 1
fi

source=$PWD/extension
target=${CARGO_TARGET_DIR:-target}/extension
mkdir -p "$target"
target=$(cd "$target" && pwd)
# One at a time.
exec 9>"$target/lock"
flock 9

as_root=()
if ((EUID != 0)) && command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
fi
status=0
# The clock of the wall may be set at any time: it fills what people read, and nothing waits or is computed by it.
wall_clock='GetCurrentTimestamp|gettimeofday|TimestampDifference|CLOCK_REALTIME|[^a-z_]time *\('
read_by_people='(\.|->)(at|started_at|postmaster_start_us) = (\(uint64\) )?GetCurrentTimestamp\(\);$'
if [[ $mode == --check ]] && grep -En "$wall_clock" "$source"/src/*.c | grep -Ev "$read_by_people" >&2; then
    echo "extension: that goes by the clock of the wall; use onecopy_now_us()" >&2
    status=1
fi
declare -A built=()
for config in "${configs[@]}"; do
    version=$("$config" --version)
    major=${version#PostgreSQL }
    major=${major%%[!0-9]*}
    name=$major
    while [[ -n ${built[$name]:-} ]]; do name=$name-other; done
    built[$name]=$config
    if [[ $mode == --check ]]; then
        # Of PostgreSQL's own headers nothing is said.
        build "$target/check-$name" "$config" COPT="${WARNINGS[*]}" \
            PG_CPPFLAGS="-isystem $("$config" --includedir-server)" || status=1
        continue
    fi
    stage=$target/$name/stage
    if ! build "$target/$name" "$config" all || ! rm -rf "$stage" ||
        ! build "$target/$name" "$config" install DESTDIR="$stage" >/dev/null; then
        echo "extension: it cannot be built for $version ($config)" >&2
        status=1
    elif ! install_changed "$stage"; then
        echo "extension: it is built for $version and not installed: let root run scripts/extension.sh" >&2
    fi
done
exit "$status"
