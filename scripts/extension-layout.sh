#!/bin/bash
# Lays out the extension's C code as PostgreSQL lays out its own, with pgindent of PostgreSQL 17.
#   scripts/extension-layout.sh           change the files
#   scripts/extension-layout.sh --check   show what would be changed, and fail when there is something
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "extension: $*" >&2
    exit 1
}

options=()
case ${1:-} in
    "") ;;
    --check) options=(--check --diff) ;;
    *) fail "unknown: $1" ;;
esac

bin=
for place in "${ONECOPY_POSTGRESQL_17:-/opt/onecopy/postgresql-17}" ""; do
    if [[ -x $place/usr/lib/postgresql/17/bin/pgindent ]]; then
        bin=$place/usr/lib/postgresql/17/bin
        break
    fi
done
[[ -n $bin ]] || fail "no pgindent of PostgreSQL 17 is found: run make setup"

# Which names are types only a compiler knows: the debugging information of what was built last has them.
shopt -s nullglob
objects=("${CARGO_TARGET_DIR:-target}"/extension/*/src/*.o)
((${#objects[@]})) || fail "type names are known once it is built: run scripts/extension.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
typedefs=$work/typedefs
readelf --debug-dump=info "${objects[@]}" 2>/dev/null |
    awk '/Abbrev Number/ { typedef = /DW_TAG_typedef/ } typedef && /DW_AT_name/ { print $NF }' | sort -u >"$typedefs"

sources=$PWD/extension/src
# It leaves its own files in the working directory when it is interrupted.
cd "$work"
"$bin/pgindent" "${options[@]}" --indent="$bin/pg_bsd_indent" --typedefs="$typedefs" "$sources"
