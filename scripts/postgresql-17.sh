#!/bin/bash
# Unpacks PostgreSQL 17 of Debian 13 beside the system, on a machine whose own release has another version: the tests
# run clones on two major versions, and the extension is built for both. The package database stays as it is; all lies
# under one directory, which can be removed.
#
# The packages come from the mirror that apt uses already and are verified by apt. They bring the C library that they
# were made for: every program gets that library's loader and its directory, so nothing of the system is replaced.
set -euo pipefail

DIRECTORY=${ONECOPY_POSTGRESQL_17:-/opt/onecopy/postgresql-17}
SUITE=trixie
# PostgreSQL, what extensions are built with, and the libraries that Debian 12 has not or has too old.
PACKAGES=(postgresql-17 postgresql-client-17 postgresql-server-dev-17 libpq5 libc6 libgcc-s1 libstdc++6 libicu76
    libldap2 libssl3t64 libxml2 libzstd1 liblz4-1 libreadline8t64)

fail() {
    echo "setup: PostgreSQL 17: $*" >&2
    exit 1
}

bin=usr/lib/postgresql/17/bin
headers=usr/include/postgresql/17/server/postgres.h
for place in "$DIRECTORY" ""; do
    # The system's own headers are a package of its own, which setup.sh sees to.
    if "$place/$bin/postgres" --version >/dev/null 2>&1 && [[ -z $place || -e $place/$headers ]]; then
        exit 0
    fi
done
echo "setup: unpacking PostgreSQL 17 into $DIRECTORY"
if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "run as root, or choose a directory of yours by ONECOPY_POSTGRESQL_17"
    exec sudo ONECOPY_POSTGRESQL_17="$DIRECTORY" "$0"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2016 # apt itself fills in what is in $().
targets=$(apt-get indextargets --format '$(LABEL) $(SITE)' 'Created-By: Packages')
mirror=$(sed -n 's/^Debian \(.*\)/\1/p' <<<"$targets" | head -n 1)
[[ -n $mirror ]] || fail "apt knows no mirror of Debian: run apt-get update first"

mkdir -p "$work"/{lists/partial,cache/archives/partial,root}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror $SUITE main" >"$work/sources.list"
: >"$work/status"
# An apt of its own: its sources, its lists, and a system in which nothing is installed.
apt=(-q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null
    -o "Dir::State=$work" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
apt-get "${apt[@]}" update >/dev/null
(cd "$work" && apt-get "${apt[@]}" download "${PACKAGES[@]}" >/dev/null)
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/root"
done

libraries=$(cd "$work/root" && dirname "$(compgen -G 'usr/lib/*/libc.so.6')")
loader=$(cd "$work/root" && compgen -G "$libraries/ld-linux*.so.*" | head -n 1)
[[ -n $loader ]] || fail "the C library has no loader where it is expected"
# Compiled queries need a library of 100 MB that no test wants; PostgreSQL does without when its part is not there.
rm -rf "$work"/root/usr/lib/postgresql/17/lib/{llvmjit.so,llvmjit_types.bc,bitcode} \
    "$work"/root/usr/share/{doc,man,locale}
for program in "$work/root/$bin"/*; do
    [[ -L $program ]] && continue
    # Not RUNPATH: the libraries' own dependencies, and modules that a server loads, are to be found there as well.
    patchelf --set-interpreter "$DIRECTORY/$loader" --force-rpath \
        --set-rpath "$DIRECTORY/$libraries" "$program" 2>/dev/null ||
        [[ $(head -c 2 "$program") == '#!' ]] || fail "patchelf cannot change $program"
done

# Extensions are compiled with this machine's C library, which has no declaration of what its server's library has; then
# PostgreSQL's own is used.
sed -i -E 's/^(#define HAVE_DECL_STRL(CPY|CAT)) 1$/\1 0/' "$work/root/${headers%/*}/pg_config.h"

# In two steps: the second is one rename, so that a directory of this name is complete.
mkdir -p "$(dirname "$DIRECTORY")"
rm -rf "$DIRECTORY.new" "$DIRECTORY.old"
mv "$work/root" "$DIRECTORY.new"
chmod 755 "$DIRECTORY.new"
[[ ! -e $DIRECTORY ]] || mv "$DIRECTORY" "$DIRECTORY.old"
mv "$DIRECTORY.new" "$DIRECTORY"
rm -rf "$DIRECTORY.old"
# A server also loads modules: each must find all of its libraries.
for file in "$DIRECTORY/$bin"/{postgres,initdb,pg_basebackup,pg_checksums,pg_amcheck,pgbench,psql} \
    "$DIRECTORY"/usr/lib/postgresql/17/lib/{libpqwalreceiver,pg_prewarm,pg_buffercache,amcheck}.so; do
    missing=$("$DIRECTORY/$loader" --library-path "$DIRECTORY/$libraries" --list "$file" | grep 'not found') &&
        fail "$file lacks $missing"
done
[[ -e $DIRECTORY/$headers && -e $("$DIRECTORY/$bin/pg_config" --pgxs) ]] ||
    fail "what extensions are built with is not there"
"$DIRECTORY/$bin/postgres" --version
