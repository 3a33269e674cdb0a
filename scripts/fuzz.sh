#!/usr/bin/env bash
# Looks for inputs that break a rule, for so many seconds; keeps those that reach code which no other input reached,
# unless it shall `discard` them.
set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: scripts/fuzz.sh TARGET SECONDS [discard]"
target=${1:?$usage}
seconds=${2:?$usage}
what_is_found=${3:-keep}
corpus=fuzz/corpus/$target
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT

# The compiler's own coverage counters, which libFuzzer reads; they need no nightly compiler. A sanitizer would.
coverage=(--cfg=fuzzing -Cpasses=sancov-module -Ccodegen-units=1
	-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
	-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares)
host=$(rustc -vV | sed -n 's/^host: //p')
# Named as a target, so that build scripts are compiled without the counters.
RUSTFLAGS="${coverage[*]}" cargo build --locked --release --manifest-path fuzz/Cargo.toml \
	--target "$host" --target-dir target/fuzz
program=target/fuzz/$host/release/$target

mkdir -p "$corpus"
"$program" -max_total_time="$seconds" -max_len=2048 -artifact_prefix="fuzz/" -print_final_stats=1 "$found" "$corpus"
if [[ $what_is_found == discard ]]; then
	echo "$(find "$found" -type f | wc -l) inputs reach something new in $target"
	exit 0
fi
# The smallest set of inputs, old and new, that reaches as much.
kept=$(mktemp -d)
"$program" -merge=1 -max_len=2048 "$kept" "$corpus" "$found" 2>&1 | tail -n 1
rm -rf "$corpus"
mv "$kept" "$corpus"
chmod 755 "$corpus"
echo "$(find "$corpus" -type f | wc -l) inputs in $corpus"
