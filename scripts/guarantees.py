#!/usr/bin/env python3
"""Compares the guarantees of SPECIFICATION.md with the tests that hold them.

    scripts/guarantees.py            writes docs/reference/tests.md
    scripts/guarantees.py --check    fails where that page, the tests and SPECIFICATION.md do not agree, and where
                                     another page names a test that is not there; also where a test belongs to both
                                     suites or to none
    cargo nextest list --profile ci --message-format json | scripts/guarantees.py --listed
                                     fails where a test does not run, or not in the suite that it names

A test says what it holds in the last line of its documentation: `/// Spec: I2` or `/// Spec: I2, D1, nightly`.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SPECIFICATION = ROOT / "SPECIFICATION.md"
PAGE = ROOT / "docs/reference/tests.md"
SUITES = ROOT / ".config/nextest.toml"
GUARANTEE = re.compile(r"^\| ([A-Z]\d+) \| \*\*(.+?)\*\*")
SPEC = re.compile(r"^\s*/// Spec: (.+)$")
# A test's function, or its name in a list that a macro makes functions of.
FUNCTION = re.compile(r"^\s*(?:(?:pub )?(?:async )?fn (\w+)\(|(\w+): \w+\()")
# A test as a page names it. Settings of PostgreSQL and names of metrics are like it, but shorter, or begin otherwise.
NAMED = re.compile(r"`(?!onecopy_)([a-z]\w*(?:_\w+){5,})`")


class Test(NamedTuple):
    name: str
    file: str
    guarantees: list[str]
    is_nightly: bool


def tests_of(file: str) -> list[Test]:
    """The tests of a file that say what they hold. A `Spec:` line without a function is an error."""
    found, spec = [], None
    for number, line in enumerate((ROOT / file).read_text().splitlines(), start=1):
        if match := SPEC.match(line):
            spec = match[1].split(", ")
        elif spec and (match := FUNCTION.match(line)):
            name = match[1] or match[2]
            found.append(Test(name, file, [each for each in spec if each != "nightly"], "nightly" in spec))
            spec = None
        elif spec and not line.strip().startswith("#[") and line.strip()[-1:] not in "(,)]":
            raise SystemExit(f"guarantees: {file}:{number}: a Spec line belongs to a test")
    return found


def page(guarantees: dict[str, str], tests: list[Test]) -> str:
    lines = [
        "# Tests by guarantee",
        "",
        "Made by `scripts/guarantees.py` from the tests' `Spec:` lines; the guarantees are those of",
        "[SPECIFICATION.md](../../SPECIFICATION.md). `cargo nextest run NAME` runs one; those marked *nightly* "
        "belong to",
        "`make nightly`, the others to `make test`.",
    ]
    for guarantee, title in guarantees.items():
        held_by = [test for test in tests if guarantee in test.guarantees]
        lines += ["", f"## {guarantee} {title}", ""]
        by_file: dict[str, list[Test]] = {}
        for test in held_by:
            by_file.setdefault(test.file, []).append(test)
        for file, members in sorted(by_file.items()):
            lines.append(f"- `{file}`")
            for test in members:
                lines.append(f"  - `{test.name}`" + (" *nightly*" if test.is_nightly else ""))
    return "\n".join(lines) + "\n"


def suites_part() -> bool:
    """Whether each test belongs to exactly one of `make test` and `make nightly`: their filters are each other's."""
    profiles = tomllib.loads(SUITES.read_text())["profile"]
    gate, nightly = (profiles[name]["default-filter"].split() for name in ("ci", "nightly"))
    return gate == ["not", "(", *nightly, ")"]


def main() -> int:
    guarantees = dict(match.groups() for match in map(GUARANTEE.match, SPECIFICATION.read_text().splitlines()) if match)
    files = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "*.rs"],
                           check=True, capture_output=True, text=True).stdout.split()
    tests = [test for file in sorted(files) for test in tests_of(file)]
    wrong = [f"{test.file}: {test.name}: there is no guarantee {each}"
             for test in tests for each in test.guarantees if each not in guarantees]
    held = {each for test in tests if not test.is_nightly for each in test.guarantees}
    wrong += [f"{each}: no test of `make test` holds it" for each in guarantees if each not in held]
    if not suites_part():
        wrong.append(f"{SUITES.relative_to(ROOT)}: the filters of `ci` and `nightly` are not each other's opposites")
    if "--listed" in sys.argv:
        runs: dict[str, set[bool]] = {}
        for suite in json.load(sys.stdin)["rust-suites"].values():
            for path, case in suite["testcases"].items():
                runs.setdefault(path.rsplit("::", 1)[-1], set()).add(case["filter-match"]["status"] == "matches")
        for test in tests:
            if test.name not in runs:
                wrong.append(f"{test.file}: {test.name} is no test that runs")
            elif (runs[test.name] == {False}) != test.is_nightly:
                wrong.append(f"{test.file}: {test.name} is {'not ' if test.is_nightly else ''}one of `make nightly`")
    words = {word for file in files for word in re.findall(r"\w+", (ROOT / file).read_text())}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    wrong += [f"{each.relative_to(ROOT)}: there is no test {name}"
              for each in pages if each != PAGE for name in NAMED.findall(each.read_text()) if name not in words]
    text = page(guarantees, tests)
    if len(sys.argv) == 1:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        wrong.append("docs/reference/tests.md is not of these tests: run scripts/guarantees.py")
    for each in wrong:
        print(f"guarantees: {each}", file=sys.stderr)
    print(f"guarantees: {len(guarantees)}, held by {len(tests)} tests")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
