#!/bin/bash
# Makes what a guest is built from and what changes seldom: Debian's packages, installed into a tar archive, and the
# kernel.
#   guest/packages.sh SUITE DIRECTORY PACKAGE...
# In DIRECTORY lie afterwards: root.tar, vmlinuz, modules/ (those of the initial file system), busybox, versions,
# kernel.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/own-apt.sh
. scripts/own-apt.sh

# What the kernel needs before and beside the root file system; some are built in, which ones differs by release.
MODULES=(virtio_pci virtio_mmio virtio_blk virtio_scsi sd_mod virtio_net virtio_console virtio-rng virtio_balloon
    virtio_mem ext4 crc32c-intel vmgenid button evdev pvpanic pvpanic_mmio pvpanic_pci)
# Documentation, translations, and compiled queries' 160 MB (PostgreSQL does without them).
LEFT_OUT=('/usr/share/doc/*' '/usr/share/man/*' '/usr/share/info/*' '/usr/share/locale/*' '/usr/share/i18n/*'
    '/usr/share/lintian/*' '*/bitcode/*' '*/llvmjit*' '*/libLLVM*' '*/libz3.so*')

suite=$1
directory=$2
shift 2

fail() {
    echo "guest: $*" >&2
    exit 1
}

command -v mmdebstrap >/dev/null || fail "no mmdebstrap: run make setup"
mirror=$(debian_mirror) || fail "apt knows no mirror of Debian: run apt-get update first"
architecture=$(dpkg --print-architecture)
rm -rf "$directory"
mkdir -p "$directory"
chmod 755 "$directory"
log=$directory/log

options=()
for path in "${LEFT_OUT[@]}"; do
    options+=("--dpkgopt=path-exclude=$path")
done
packages=$(
    IFS=,
    echo "$*"
)
# Hooks get the new system's directory as their first argument, and an apt that works on it.
# shellcheck disable=SC2016
no_cluster='mkdir -p "$1/etc/postgresql-common/createcluster.d"
    echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.d/onecopy.conf"'
# shellcheck disable=SC2016
kernel='cd "$ONECOPY_DIRECTORY"
    export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG
    name=$(apt-cache depends linux-image-cloud-$ONECOPY_ARCHITECTURE |
        sed -n "s/.*Depends: \(linux-image-[^ ]*\).*/\1/p" | head -n 1)
    apt-get -q -o APT::Sandbox::User=root download "$name"
    dpkg-query --admindir="$1/var/lib/dpkg" -W -f "\${Package} \${Version}\n" >versions'
# What differs from one installation to the next: keys, caches, logs. Not what lies in /tmp: the configuration of
# mmdebstrap's own apt does, and without it that would clean this machine's lists of packages.
# shellcheck disable=SC2016
same='cd "$1"
    rm -f etc/ssl/private/ssl-cert-snakeoil.key etc/ssl/certs/ssl-cert-snakeoil.pem var/cache/ldconfig/aux-cache
    find etc/ssl/certs -xtype l -delete
    find var/cache/debconf var/log run ! -type d -delete
    : >etc/machine-id
    echo guest >etc/hostname
    printf "127.0.0.1 localhost\n" >etc/hosts
    : >etc/resolv.conf
    mkdir -p var/lib/onecopy usr/lib/onecopy'

export SOURCE_DATE_EPOCH=$ONECOPY_GUEST_EPOCH ONECOPY_DIRECTORY=$directory ONECOPY_ARCHITECTURE=$architecture
echo "guest: installing $packages of $suite from $mirror"
mmdebstrap --variant=minbase --components=main --include="$packages" "${options[@]}" --essential-hook="$no_cluster" \
    --customize-hook="$kernel" --customize-hook="$same" "$suite" "$directory/root.tar" "$mirror" >"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    fail "Debian's packages cannot be installed (see above)." \
        "Without a network an image that was built before is used as it is."
}

deb=$(compgen -G "$directory/linux-image-*.deb") || fail "the kernel's package was not loaded"
dpkg-deb -x "$deb" "$directory/kernel-files"
# The modules lie in /lib in one release and in /usr/lib in the next.
tree=$(dirname "$(find "$directory/kernel-files" -name modules.builtin)")
release=${tree##*/}
cp "$directory/kernel-files/boot/vmlinuz-$release" "$directory/vmlinuz"
tar -C "$directory" --strip-components=3 -xf "$directory/root.tar" ./usr/bin/busybox 2>/dev/null ||
    tar -C "$directory" --strip-components=2 -xf "$directory/root.tar" ./bin/busybox

# add_module NAME: unpacks that module behind those that it needs; their order is the one in which they are loaded.
mkdir "$directory/modules"
add_module() {
    local name=${1//-/_} file needed module
    [[ ! -e $directory/modules/$name.ko ]] || return 0
    file=$(find "$tree" \( -name "$name.ko*" -o -name "${name//_/-}.ko*" \) -print -quit)
    # It is built in.
    [[ -n $file ]] || return 0
    if [[ $file == *.xz ]]; then
        xz -dc "$file" >"$directory/modules/$name.ko"
    else
        cp "$file" "$directory/modules/$name.ko"
    fi
    needed=$(tr '\0' '\n' <"$directory/modules/$name.ko" | sed -n 's/^depends=//p' | head -n 1)
    for module in ${needed//,/ }; do
        add_module "$module"
    done
    echo "$name.ko" >>"$directory/modules/order"
}
for module in "${MODULES[@]}"; do
    add_module "$module"
done
echo "$release" >"$directory/kernel"
rm -rf "$directory/kernel-files" "$deb"
