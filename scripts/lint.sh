#!/bin/bash
# Checks that need no server: layout, lints, licences, scripts. Goes on after a failure, so that one run names them all.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

failed=()

check() {
    local name=$1
    shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
}

check rustfmt cargo fmt --all --check
check clippy cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
# What one installs: without what `own` adds, which tests have.
check clippy-installed cargo clippy --locked --package onecopy --quiet -- -D warnings
RUSTDOCFLAGS="-D warnings" check rustdoc cargo doc --locked --workspace --no-deps --quiet
# Not `advisories`: that check downloads a database, and a build must not need one more network service.
check cargo-deny cargo deny --log-level error check licenses bans sources
mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
check guarantees scripts/guarantees.py --check
check words scripts/words.py
check circles scripts/circles.py
check shellcheck shellcheck "${scripts[@]}"
check extension scripts/extension.sh --check
# Behind it, because it needs the names of types.
check pgindent scripts/extension-layout.sh --check

if ((${#failed[@]})); then
    echo "lint: failed: ${failed[*]}"
    exit 1
fi
echo "lint: rustfmt, clippy, rustdoc, cargo-deny (licenses, bans, sources), guarantees, words, circles, shellcheck," \
    "the C compiler and pgindent are content"
