# shellcheck shell=bash
# An apt of its own, for packages of another release than the system's: the system's sources, lists and package database
# stay as they are. The mirror is the one that the system's apt uses; apt verifies what it loads. To be sourced.

# debian_mirror: the address of the system's mirror of Debian; fails when its apt has none. From what apt has loaded,
# else, where it has loaded nothing yet, from its sources.
debian_mirror() {
    local targets mirror
    # shellcheck disable=SC2016 # apt itself fills in what is in $().
    targets=$(apt-get indextargets --format '$(LABEL) $(SITE)' 'Created-By: Packages' 2>/dev/null || true)
    mirror=$(sed -n 's/^Debian \(.*\)/\1/p' <<<"$targets" | head -n 1)
    [[ -n $mirror ]] || mirror=$(
        grep -rhoE '^[^#]*https?://[^ ]*/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
            grep -oE 'https?://[^ ]*' | head -n 1
    )
    [[ -n $mirror ]] || return 1
    echo "${mirror%/}"
}

# own_apt DIRECTORY MIRROR SUITE...: makes the array `apt`, the options of an apt that keeps all it has in DIRECTORY.
own_apt() {
    local directory=$1 mirror=$2 suite
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    shift 2
    mkdir -p "$directory"/{lists/partial,cache/archives/partial}
    for suite in "$@"; do
        echo "deb [signed-by=$keyring] $mirror $suite main"
    done >"$directory/sources.list"
    # shellcheck disable=SC2034 # Used where this file is sourced.
    apt=(-q -o "Dir::Etc::SourceList=$directory/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::lists=$directory/lists" -o "Dir::Cache=$directory/cache" -o APT::Sandbox::User=root
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
}

# own_apt_for_empty_system DIRECTORY MIRROR SUITE...: the same for a system in which nothing is installed: what it loads
# is complete in itself.
own_apt_for_empty_system() {
    own_apt "$@"
    : >"$1/status"
    apt+=(-o "Dir::State::status=$1/status" -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null)
}
