#!/usr/bin/env python3
"""Tells how long tests took, from the JUnit report of cargo-nextest; fails when their sum exceeds the budget.

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
    times = [
        (float(test.get("time", 0)), f"{test.get('classname')} {test.get('name')}") for test in report.iter("testcase")
    ]
    total = sum(time for time, _ in times)
    print(f"the {SLOWEST} slowest tests:")
    for time, name in sorted(times, reverse=True)[:SLOWEST]:
        print(f"{time:8.1f} s  {name}")
    said = f"test times: {len(times)} tests took {total:.0f} s in {float(report.get('time', 0)):.0f} s"
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
