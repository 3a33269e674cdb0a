#!/bin/bash
# Builds the guest: kernel, initial file system and a root file system with PostgreSQL and the agent. What has not
# changed is not built again; a change of the agent takes seconds. The same inputs make the same bytes.
#   guest/build-image.sh [OPTION]...
#     --postgresql 15|17   the major version (17)
#     --mariadb            with MariaDB's server
#     --package NAME       with this package of Debian, too; may be given again
#     --directory D        where images lie (ONECOPY_GUEST_DIRECTORY, else /var/cache/onecopy/guest)
#     --agent FILE         the agent's program (what `make build` has built)
#     --rebuild            load the packages anew, for their newest versions
#     --verify             build the file systems twice, and fail when they differ
#     --boot-time          boot it, and print how long that takes
set -euo pipefail
cd "$(dirname "$0")/.."

# The date of every file in the image that is newer, so that the day of building does not show.
EPOCH=1767225600
# Fixed, because the image is the same: a copy of a guest gets what tells it from others from its host.
FILE_SYSTEM=5f1ae0d4-3c0b-4c67-9d5e-6f6e65636f70
HASH_SEED=9b3c1f52-7a44-4e0f-8f0c-6f6e65636f71
# Of the file system in the image, most of it a hole. A guest grows it to its disk's size.
ROOT_SIZE=2G
BOOT_SECONDS_MAX=120
# Older images of a name that stay: disks made a moment ago may still be about to link theirs.
OLD_IMAGES_MAX=2

major=17
packages=()
name_end=
directory=${ONECOPY_GUEST_DIRECTORY:-/var/cache/onecopy/guest}
agent=${CARGO_TARGET_DIR:-target}/debug/onecopy-guest-agent
rebuild=
verify=
boot_time=

fail() {
    echo "guest: $*" >&2
    exit 1
}

usage() {
    sed -n 's/^#   //p' "$0" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --postgresql | --package | --directory | --agent) (($# > 1)) || usage ;;&
        --postgresql)
            major=$2
            shift
            ;;
        --mariadb)
            packages+=(mariadb-server-core)
            name_end+=-mariadb
            ;;
        --package)
            [[ $2 =~ ^[a-z0-9][a-z0-9+.-]+$ ]] || fail "no name of a package: $2"
            packages+=("$2")
            name_end+=-$2
            shift
            ;;
        --directory)
            directory=$2
            shift
            ;;
        --agent)
            agent=$2
            shift
            ;;
        --rebuild) rebuild=1 ;;
        --verify) verify=1 ;;
        --boot-time) boot_time=1 ;;
        *) usage ;;
    esac
    shift
done
case $major in
    15) suite=bookworm ;;
    17) suite=trixie ;;
    *) fail "PostgreSQL $major is in no release of Debian that this script knows: 15 or 17" ;;
esac
packages=("postgresql-$major" iproute2 procps e2fsprogs busybox-static "${packages[@]}")
name=postgresql-$major$name_end
# The clone's and the router's own module, where it was built for this version.
extension=
for root in "${ONECOPY_POSTGRESQL_17:-/opt/onecopy/postgresql-17}" ""; do
    [[ ! -e $root/usr/lib/postgresql/$major/lib/onecopy.so ]] || extension=$root
    [[ -z $extension ]] || break
done

[[ -x $agent ]] || fail "no agent at $agent: run make build, or name it by --agent"
mkdir -p "$directory" 2>/dev/null || true
[[ -w $directory ]] ||
    fail "$directory cannot be written to: run as root, or choose another by ONECOPY_GUEST_DIRECTORY or --directory"
directory=$(realpath "$directory")
# One build at a time. Whoever waits finds it done.
exec 9>"$directory/lock"
flock 9

work=
clean_up() {
    [[ -z $work ]] || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM
# What a build that was killed has left: the lock is ours.
rm -rf "$directory"/.work.*
work=$(mktemp -d "$directory/.work.XXXXXX")
chmod 755 "$work"

# hash_of TEXT FILE...: one for all that a step depends on.
hash_of() {
    local text=$1
    shift
    { echo "$text" && sha256sum "$@" | cut -d ' ' -f 1; } | sha256sum | head -c 16
}

# Step one: Debian's packages and kernel.
packages_key=$(hash_of "$suite ${packages[*]} $EPOCH" guest/packages.sh)
base=$directory/packages/$name
if [[ -n $rebuild || $(cat "$base/key" 2>/dev/null) != "$packages_key" ]]; then
    ONECOPY_GUEST_EPOCH=$EPOCH guest/packages.sh "$suite" "$work/packages" "${packages[@]}"
    echo "$packages_key" >"$work/packages/key"
    # What was loaded, not only what was asked for.
    sha256sum <"$work/packages/root.tar" | head -c 16 >"$work/packages/content"
    mkdir -p "$directory/packages"
    sync -f "$work/packages"
    rm -rf "$base"
    mv "$work/packages" "$base"
fi

# Step two: our files beside them.
copy_extension() {
    [[ -e $extension/usr/lib/postgresql/$major/lib/onecopy.so ]] || return 0
    local libraries=usr/lib/postgresql/$major/lib shared=usr/share/postgresql/$major/extension
    install -D -m 644 -t "$1/$libraries" "$extension/$libraries/onecopy.so"
    install -D -m 644 -t "$1/$shared" "$extension/$shared"/onecopy*
}

mkdir "$work/files" "$work/initrd"
cp -r guest/root/. "$work/files/"
install -D -m 755 "$agent" "$work/files/usr/lib/onecopy/guest-agent"
# A script, in its place, has no symbols to lose.
strip "$work/files/usr/lib/onecopy/guest-agent" 2>/dev/null || true
copy_extension "$work/files"
chmod -R u=rwX,go=rX "$work/files"

tool=$(guest/file-system-tools.sh "$directory/tools")
tool_version=$("$tool" -V 2>&1 | sed -n 1p)
mapfile -t inputs < <(find "$work/files" -type f | LC_ALL=C sort)
# The bytes of a file are not all that gets into the image: its name and permissions do, too.
names=$(cd "$work/files" && find . -printf '%M %p\n' | LC_ALL=C sort)
key=$(hash_of "$(cat "$base/key" "$base/content") $FILE_SYSTEM $HASH_SEED $ROOT_SIZE $tool_version $names" \
    "${inputs[@]}" guest/initrd/init guest/build-image.sh)
image=$directory/$name.$key

# archive DIRECTORY: names the files in it, in an order of their own, for whatever packs them.
archive() {
    find "$1" -exec touch --no-dereference --date="@$EPOCH" {} +
    (cd "$1" && find . -mindepth 1 "${@:2}" | LC_ALL=C sort)
}

sum() {
    sha256sum <"$1" | cut -d ' ' -f 1
}

make_initrd() {
    local place=$work/initrd program
    mkdir -p "$place"/{bin,dev,proc,sys,root}
    install -m 755 "$base/busybox" "$place/bin/busybox"
    for program in sh mount insmod usleep switch_root poweroff cat; do
        ln -s busybox "$place/bin/$program"
    done
    install -m 755 guest/initrd/init "$place/init"
    cp -r "$base/modules" "$place/modules"
    chmod -R u=rwX,go=rX "$place"
    archive "$place" >"$work/names"
    (cd "$place" && cpio --quiet --create --format=newc --reproducible --owner=+0:+0) <"$work/names" | gzip -n -6 >"$1"
}

make_root() {
    archive "$work/files" ! -type d >"$work/names"
    cp "$base/root.tar" "$work/root.tar"
    tar --append --file="$work/root.tar" --directory="$work/files" --no-recursion --owner=0 --group=0 --numeric-owner \
        --format=pax --pax-option=delete=atime,delete=ctime --files-from="$work/names"
    rm -f "$1"
    SOURCE_DATE_EPOCH=$EPOCH "$tool" -q -t ext4 -L onecopy -U "$FILE_SYSTEM" -m 0 -d "$work/root.tar" \
        -E "hash_seed=$HASH_SEED,lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0" "$1" "$ROOT_SIZE" ||
        fail "the root file system cannot be made in $directory: is there room? (df $directory)"
    rm "$work/root.tar"
}

make_image() {
    local new=$work/image
    mkdir "$new"
    make_initrd "$new/initrd"
    make_root "$new/root.img"
    cp "$base/vmlinuz" "$new/vmlinuz"
    cat >"$new/manifest.toml" <<END
# A guest image of Onecopy. Its files never change: a newer image is another directory.
format = 1
name = "$name"
key = "$key"
suite = "$suite"
kernel = "$(cat "$base/kernel")"
postgresql = $major
extension = $([[ -e $work/files/usr/lib/postgresql/$major/lib/onecopy.so ]] && echo true || echo false)

[sha256]
vmlinuz = "$(sum "$new/vmlinuz")"
initrd = "$(sum "$new/initrd")"
"root.img" = "$(sum "$new/root.img")"

[packages]
$(sed 's/\([^ ]*\) \(.*\)/"\1" = "\2"/' "$base/versions")
END
    chmod -R u=rwX,go=rX "$new"
}

if [[ ! -e $image/manifest.toml || -n $rebuild || -n $verify ]]; then
    SECONDS=0
    make_image
    if [[ -n $verify ]]; then
        mv "$work/image" "$work/first"
        rm -rf "$work/initrd"
        make_image
        for file in initrd root.img; do
            cmp "$work/first/$file" "$work/image/$file" || fail "two builds of the same inputs differ"
        done
        echo "guest: two builds are the same: $(sum "$work/image/root.img") root.img," \
            "$(sum "$work/image/initrd") initrd"
    fi
    # One rename: an image that is there is complete, also after a power cut. One that is there already is the same.
    sync -f "$work/image"
    [[ -e $image ]] || mv "$work/image" "$image"
    echo "guest: built in $SECONDS s"
fi
ln -s "$name.$key" "$work/link"
mv -T "$work/link" "$directory/$name"
sync -f "$directory"
# Who needs an image for longer has linked or copied its files.
find "$directory" -maxdepth 1 -type d -name "$name.*" ! -name "$name.$key" -printf '%T@ %p\n' | sort -rn |
    cut -d ' ' -f 2- | tail -n +$((OLD_IMAGES_MAX + 1)) | xargs --no-run-if-empty rm -rf

megabytes() {
    du -ml "$@" | tail -n 1 | cut -f 1
}
echo "guest: $directory/$name -> $name.$key: root.img $(megabytes "$image/root.img") MB of $ROOT_SIZE, kernel" \
    "$(megabytes "$image/vmlinuz") MB, initrd $(megabytes "$image/initrd") MB"

if [[ -n $boot_time ]]; then
    guest/boot-time.sh "$image" "$BOOT_SECONDS_MAX"
fi
