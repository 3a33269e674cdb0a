#!/bin/bash
# Prints the command that makes a file system out of an archive: mke2fs 1.47.1 or newer, the first that takes a tar
# archive and makes the same bytes of the same one. Where the system's is older, Debian 13's is unpacked into the given
# directory, with the libraries that it was made for.
#   guest/file-system-tools.sh DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/own-apt.sh
. scripts/own-apt.sh

DIRECTORY=$1
SUITE=trixie
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT

# works COMMAND...: does this mke2fs take an archive?
works() {
    mkdir -p "$probe/sample"
    tar -C "$probe/sample" -cf "$probe/archive.tar" .
    rm -f "$probe/probe.img"
    "$@" -q -t ext4 -d "$probe/archive.tar" "$probe/probe.img" 4M >/dev/null 2>&1
}

system=$(PATH=$PATH:/usr/sbin:/sbin command -v mke2fs || true)
if [[ -n $system ]] && works "$system"; then
    echo "$system"
    exit 0
fi
if [[ -x $DIRECTORY/mke2fs ]] && works "$DIRECTORY/mke2fs"; then
    echo "$DIRECTORY/mke2fs"
    exit 0
fi

echo "guest: unpacking mke2fs of Debian 13 into $DIRECTORY" >&2
mirror=$(debian_mirror) || {
    echo "guest: apt knows no mirror of Debian: run apt-get update first" >&2
    exit 1
}
own_apt_for_empty_system "$probe/apt" "$mirror" "$SUITE"
{
    apt-get "${apt[@]}" update
    apt-get "${apt[@]}" install --yes --no-install-recommends --download-only e2fsprogs libarchive13t64
} >"$probe/log" 2>&1 || {
    cat "$probe/log" >&2
    echo "guest: cannot load e2fsprogs of $SUITE from $mirror (see above)" >&2
    exit 1
}
for package in "$probe"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$probe/root"
done
libraries=$(cd "$probe/root" && dirname "$(compgen -G 'usr/lib/*/libc.so.6')")
loader=$(cd "$probe/root" && compgen -G "$libraries/ld-linux*.so.*" | head -n 1)
cat >"$probe/root/mke2fs" <<END
#!/bin/sh
here=\$(dirname "\$0")
exec "\$here/$loader" --library-path "\$here/$libraries" "\$here/usr/sbin/mke2fs" "\$@"
END
chmod 755 "$probe/root" "$probe/root/mke2fs"
mkdir -p "$(dirname "$DIRECTORY")"
rm -rf "$DIRECTORY.new" "$DIRECTORY"
cp -a "$probe/root" "$DIRECTORY.new"
mv "$DIRECTORY.new" "$DIRECTORY"
works "$DIRECTORY/mke2fs" || {
    echo "guest: $DIRECTORY/mke2fs does not work" >&2
    exit 1
}
echo "$DIRECTORY/mke2fs"
