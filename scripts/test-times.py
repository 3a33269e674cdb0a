#!/usr/bin/env python3
"""Tells how long tests took and which failed with what message, from the JUnit report of cargo-nextest; fails when all
together took longer than the budget, or when more reads were excused than PostgreSQL's certifier explains. That some
failed is for cargo-nextest to say.

    scripts/test-times.py REPORT [BUDGET_SECONDS]
"""

import sys
from xml.etree import ElementTree

SLOWEST = 30
# What tests/src/verdict.rs prints for a read that it leaves out. The window was met once in very many runs: two of one
# run have another cause.
EXCUSED, EXCUSES_MAX = "PostgreSQL's certifier let a read", 1
ITS_OWN = " verdict::tests::"
# Of what a test that failed has said: whoever has the last lines of a run alone must see why it failed.
LINES_MAX, COLUMNS_MAX, FAILURES_MAX = 12, 1000, 10


def message_of(failure: ElementTree.Element) -> list[str]:
    """From the panic on, or the last lines where nothing panicked."""
    lines = [line for line in (failure.text or failure.get("message") or "").splitlines() if line.strip()]
    panicked = next((at for at, line in enumerate(lines) if " panicked at " in line), None)
    lines = lines[-LINES_MAX:] if panicked is None else lines[panicked : panicked + LINES_MAX]
    return [line[:COLUMNS_MAX] for line in lines]


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        report = ElementTree.parse(sys.argv[1]).getroot()
    except (OSError, ElementTree.ParseError) as error:
        print(f"test times: {sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    tests = [(test, f"{test.get('classname')} {test.get('name')}") for test in report.iter("testcase")]
    times = [(float(test.get("time", 0)), name) for test, name in tests]
    failures = [(name, test.find(kind)) for test, name in tests for kind in ("failure", "error")]
    failed = [(name, failure) for name, failure in failures if failure is not None]
    total = sum(time for time, _ in times)
    print(f"the {SLOWEST} slowest tests:")
    for time, name in sorted(times, reverse=True)[:SLOWEST]:
        print(f"{time:8.1f} s  {name}")
    for at, (name, failure) in enumerate(failed):
        print(f"failed: {name}")
        for line in message_of(failure) if at < FAILURES_MAX else []:
            print(f"    {line}")
    said_by = [(test.findtext("system-out") or "", name) for test, name in tests if ITS_OWN not in name]
    excused = [name for text, name in said_by for _ in range(text.count(EXCUSED))]
    for name in excused:
        print(f"a read was excused in {name}")
    said = f"test times: {len(times)} tests, {len(failed)} failed, took {total:.0f} s"
    said += f" in {float(report.get('time', 0)):.0f} s"
    if len(excused) > EXCUSES_MAX:
        print(f"{said}; {len(excused)} reads were excused: at most {EXCUSES_MAX} is explained", file=sys.stderr)
        return 1
    if len(sys.argv) == 2:
        print(said)
        return 0
    budget = float(sys.argv[2])
    print(f"{said}, of a budget of {budget:.0f} s")
    if total > budget:
        print("test times: over budget: make tests quicker, or move second versions to `make nightly`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
