#!/usr/bin/env python3
"""Compares the promises of SPECIFICATION.md with the tests that are there.

    cargo nextest list --profile ci --message-format json | scripts/promises.py

Fails when a promise has no test, names one that is not there, or marks the wrong ones as *(nightly)*, and when a test has the
number of a promise that is not there. `--list` prints each promise with the number of its tests in both suites.
"""

import json
import re
import sys
from pathlib import Path

SPECIFICATION = Path(__file__).parent.parent / "SPECIFICATION.md"
ROW = re.compile(r"^\| ([A-Z]\d+) \|")
# A test, or `.._end` of one that begins as the one before; then perhaps the mark.
NAME = re.compile(r"`(\.\._)?([a-z0-9_]+)`( \*\(nightly\)\*)?")
NUMBERED = re.compile(r"^([a-z]\d+)_")


def listed() -> dict[str, set[bool]]:
    """Of each test's name without its module: whether the gate runs those of that name."""
    tests: dict[str, set[bool]] = {}
    for suite in json.load(sys.stdin)["rust-suites"].values():
        for path, case in suite["testcases"].items():
            name = path.rsplit("::", 1)[-1]
            tests.setdefault(name, set()).add(case["filter-match"]["status"] == "matches")
    return tests


def completed(end: str, before: str, tests: dict[str, set[bool]]) -> str | None:
    """The test that begins as the one before, up to a word, and ends so."""
    words = before.split("_")
    candidates = ("_".join([*words[:count], end]) for count in range(len(words), 0, -1))
    return next((name for name in candidates if name in tests), None)


def main() -> int:
    tests, wrong, held = listed(), [], {}
    for line in SPECIFICATION.read_text().splitlines():
        row = ROW.match(line)
        if not row:
            continue
        promise, before = row[1], ""
        held[promise] = counts = {"gate": 0, "nightly": 0}
        column = line.rstrip("| ").rsplit(" | ", 1)[-1]
        for is_end, text, mark in NAME.findall(column):
            name = completed(text, before, tests) if is_end else text
            if name not in tests:
                # Of other words between backticks none looks like a test.
                if is_end or text.count("_") > 1:
                    wrong.append(f"{promise}: there is no test {is_end}{text}")
                continue
            before = name
            is_nightly = tests[name] == {False}
            counts["nightly" if is_nightly else "gate"] += 1
            if is_nightly != bool(mark):
                wrong.append(f"{promise}: {name} is {'' if is_nightly else 'not '}one of `make nightly`")
        if not any(counts.values()) and "unit tests of" not in column and "not yet held" not in column:
            wrong.append(f"{promise}: it names no test")
    letters = {promise[0] for promise in held}
    for name in tests:
        number = NUMBERED.match(name)
        if number and number[1][0].upper() in letters and number[1].upper() not in held:
            wrong.append(f"{name}: there is no promise {number[1].upper()}")
    if "--list" in sys.argv:
        for promise, counts in held.items():
            print(promise, counts["gate"], counts["nightly"])
    for text in wrong:
        print(f"promises: {text}", file=sys.stderr)
    nightly = [promise for promise, counts in held.items() if counts["nightly"] and not counts["gate"]]
    print(f"promises: {len(held)}, {len(nightly)} of them held by `make nightly` alone: {' '.join(nightly)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
