#!/bin/bash
# Sees to QEMU 10 or newer, which live migration of guests without hardware help needs. Where the release has an older
# one (Debian 12), its backports have it: they are asked by an apt of their own, so that nothing else of them comes to
# be installed, now or later.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/own-apt.sh
. scripts/own-apt.sh

MAJOR_MIN=10
PACKAGES=(qemu-system-x86 qemu-utils)

fail() {
    echo "setup: QEMU: $*" >&2
    exit 1
}

# new_enough VERSION: one of a package or of a program, like 1:10.0.2+ds-2.
new_enough() {
    local version=${1#*:}
    [[ $version =~ ^[0-9]+ ]] && ((BASH_REMATCH[0] >= MAJOR_MIN))
}

version=$(qemu-system-x86_64 --version 2>/dev/null | sed -n 's/^QEMU emulator version \([^ ]*\).*/\1/p' || true)
if new_enough "$version" && command -v qemu-img >/dev/null; then
    exit 0
fi
command -v apt-get >/dev/null || fail "this is no Debian or Ubuntu: install QEMU $MAJOR_MIN or newer yourself"
as_root=()
if ((EUID != 0)); then
    command -v sudo >/dev/null || fail "run as root, or let root install QEMU $MAJOR_MIN or newer"
    as_root=(sudo)
fi
install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get)

"${as_root[@]}" apt-get update -q
candidate=$(apt-cache policy "${PACKAGES[0]}" | sed -n 's/^ *Candidate: //p')
if new_enough "$candidate"; then
    echo "setup: installing QEMU $candidate"
    exec "${install[@]}" install -qy --no-install-recommends "${PACKAGES[@]}"
fi

# shellcheck disable=SC1091 # Every Debian has that file.
release=$(. /etc/os-release && echo "${ID:-} ${VERSION_CODENAME:-}")
[[ $release == debian\ ?* ]] || fail "$release has $candidate: install QEMU $MAJOR_MIN or newer yourself"
release=${release#debian }
mirror=$(debian_mirror) || fail "apt knows no mirror of Debian"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
own_apt "$work" "$mirror" "$release" "$release-backports"
echo "setup: installing QEMU of $release-backports"
"${as_root[@]}" apt-get "${apt[@]}" update
"${install[@]}" "${apt[@]}" install -y --no-install-recommends --target-release "$release-backports" "${PACKAGES[@]}"
version=$(qemu-system-x86_64 --version | sed -n 's/^QEMU emulator version \([^ ]*\).*/\1/p')
new_enough "$version" || fail "$release-backports has $version: install QEMU $MAJOR_MIN or newer yourself"
