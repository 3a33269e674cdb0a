#!/usr/bin/env python3
"""Tells how long tests took and which failed, from the JUnit report of cargo-nextest; fails when all together took
longer than the budget. That some failed is for cargo-nextest to say.

    scripts/test-times.py REPORT [BUDGET_SECONDS]
"""

import sys
from xml.etree import ElementTree

SLOWEST = 30


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
    failed = [name for test, name in tests if test.find("failure") is not None or test.find("error") is not None]
    total = sum(time for time, _ in times)
    print(f"the {SLOWEST} slowest tests:")
    for time, name in sorted(times, reverse=True)[:SLOWEST]:
        print(f"{time:8.1f} s  {name}")
    for name in failed:
        print(f"failed: {name}")
    said = f"test times: {len(times)} tests, {len(failed)} failed, took {total:.0f} s"
    said += f" in {float(report.get('time', 0)):.0f} s"
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
