#!/usr/bin/env python3
"""Fails where lines are wider than 120 columns, and where a word is used that nobody in the field uses.

C is pgindent's business, but for its comments. Tables, links and what is quoted by a fence, as in a comment's diagram,
may be wider.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS = 120
COMMENT = re.compile(r"^\s*(//[/!]?|#(?!\[)|\*|/\*)")
# Files of which every line counts, code too: rustfmt leaves what it cannot break, long strings first of all.
WHOLE = {".rs", ".py", ".sh"}
# Made by programs, and the list of words itself.
SKIPPED = re.compile(r"docs/results/|scripts/words.py$")
# What this project once called something that has a name: the name is in the message.
WORDS = {
    r"Occupants?|Visits?": "an in-flight commit",
    r"unsettled": "in doubt",
    r"laborator(y|ies)": "a harness",
    r"VhostDoor|DiskDoor": "a back end",
    r"HoldPolicy|CompletionHolds?Policy": "CompletionHold",
    r"silence_file": "ignore mark",
    r"burials?|buried": "cleaned up",
    r"Judge?ments?|judged_at|judge_again": "a classification",
    r"speaks_of_the_server": "server-specific",
    r"tells_the_time": "time-dependent",
    r"Workshop": "a provisioner",
    r"\w*PATIENCE|Patience": "a timeout",
    r"Stretch": "an extent",
    r"speed_of_hand": "the clock sweep's speed",
    r"Seat": "an allocation",
    r"inquiry": "a client of the daemon",
}


def main() -> int:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"],
                            check=True, capture_output=True, text=True).stdout.split()
    words = {re.compile(rf"\b({word})\b"): name for word, name in WORDS.items()}
    wrong = []
    for file in listed:
        kind = Path(file).suffix
        if kind not in {".rs", ".c", ".h", ".sh", ".py", ".md"} or not (ROOT / file).exists() or SKIPPED.match(file):
            continue
        fenced = False
        for number, line in enumerate((ROOT / file).read_text().splitlines(), start=1):
            comment = COMMENT.match(line)
            fenced = (kind == ".md" or bool(comment)) and fenced ^ COMMENT.sub("", line).lstrip().startswith("```")
            prose = kind == ".md" and not line.startswith("|") and "](" not in line
            if len(line) > COLUMNS and not fenced and (prose or comment and kind != ".md" or kind in WHOLE):
                wrong.append(f"{file}:{number}: {len(line)} columns")
            wrong += [f"{file}:{number}: {found[0]}: the field says {name}"
                      for word, name in words.items() if (found := word.search(line))]
    for each in wrong:
        print(f"words: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
