#!/usr/bin/env python3
"""Fails where the files of one of `crates` use each other in a circle, and names what each uses of the next.

A file inside another one's module may use what that holds: Rust's privacy is made for it. Tests count for nothing.
Names are looked up through `use` and re-exports, as the compiler does, but by their spelling alone: what a macro makes
is not seen, nor whose method is called.
"""

import re
import sys
from pathlib import Path

CRATES = Path(__file__).parent.parent / "crates"
COMMENT = re.compile(r"""//[^\n]*|'"'|r#".*?"#|"(?:\\.|[^"\\])*\"""", re.DOTALL)
TESTS = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))? )?mod tests \{.*", re.DOTALL)
USE = re.compile(r"\b(pub(?:\([^)]*\))? )?use ([^;]+);")
PATH = re.compile(r"(?<![\w:])\w+(?:::\w+)+")

Module = tuple[str, ...]


def modules(crate: Path) -> dict[Module, str]:
    """Each module's text, without comments, strings and tests."""
    found = {}
    for file in sorted(crate.glob("src/**/*.rs")):
        name = file.relative_to(crate / "src").with_suffix("").parts
        name = name[:-1] if name[-1] in ("mod", "lib", "main") else name
        if "tests" not in name:
            text = TESTS.sub("", file.read_text())
            found[name] = COMMENT.sub(lambda match: "" if match[0][0] == "/" else '""', text)
    return found


def leaves(tree: str, prefix: Module = ()) -> list[tuple[str, Module]]:
    """What a `use` names: the name here, and its path."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(tree + ","):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            parts.append(tree[start:at].strip())
            start = at + 1
    named = []
    for part in filter(None, parts):
        if "{" in part:
            head, rest = part.split("{", 1)
            named += leaves(rest.rsplit("}", 1)[0], (*prefix, *filter(None, head.strip().split("::"))))
        else:
            path, _, alias = part.partition(" as ")
            whole = (*prefix, *path.strip().split("::"))
            whole = whole[:-1] if whole[-1] == "self" else whole
            named.append((alias.strip() or whole[-1], whole))
    return named


class Crate:
    def __init__(self, directory: Path):
        self.name = directory.name
        self.texts = modules(directory)
        self.names = {module: {} for module in self.texts}
        for module, text in self.texts.items():
            for name, path in (leaf for found in USE.finditer(text) for leaf in leaves(found[2])):
                self.names[module][name] = path

    def holder(self, module: Module, path: Module, steps: int = 8) -> Module | None:
        """The module that has what `path` means in `module`; none: it is of another crate, or only a local name."""
        if path[0] == "crate":
            place, path = (), path[1:]
        elif path[0] in ("self", "super"):
            place = module
            while path and path[0] in ("self", "super"):
                place, path = place[:-1] if path[0] == "super" else place, path[1:]
        elif (*module, path[0]) in self.texts or path[0] in self.names[module]:
            place = module
        else:
            return None
        for at, name in enumerate(path):
            if (*place, name) in self.texts:
                place = (*place, name)
            elif name in self.names.get(place, {}) and steps:
                target = self.names[place][name]
                return self.holder(place, (*target, *path[at + 1:]), steps - 1)
            else:
                break
        return place

    def uses(self) -> dict[Module, dict[Module, set[str]]]:
        """What each module has of which other one, but of those that it is inside of; what it shows of those inside of
        it is no use of them."""
        uses = {module: {} for module in self.texts}
        for module, text in self.texts.items():
            named = {(path, bool(found[1])) for found in USE.finditer(text) for _, path in leaves(found[2])}
            named |= {(tuple(found[0].split("::")), False) for found in PATH.finditer(USE.sub("", text))}
            for path, is_shown in named:
                holder = self.holder(module, path)
                if holder is None or holder == module[:len(holder)] or is_shown and module == holder[:len(module)]:
                    continue
                uses[module].setdefault(holder, set()).add(path[-1])
        return uses


def circles(uses: dict[Module, dict[Module, set[str]]]) -> list[list[Module]]:
    """The shortest way from each module back to it, each circle once."""
    found = {}
    for begin in uses:
        ways, seen = [[begin]], {begin}
        for way in ways:
            if begin in uses[way[-1]]:
                found.setdefault(frozenset(way), way)
                break
            ways += [[*way, after] for after in uses[way[-1]] if not (after in seen or seen.add(after))]
    return sorted(found.values(), key=lambda way: (len(way), way))


def main() -> int:
    wrong = 0
    for directory in sorted(CRATES.iterdir()):
        uses = Crate(directory).uses()
        for way in circles(uses):
            wrong += 1
            print(f"circles: {directory.name}:", file=sys.stderr)
            for one, next_one in zip(way, [*way[1:], way[0]]):
                names = ", ".join(sorted(uses[one][next_one]))
                print(f"    {'/'.join(one)} uses {names} of {'/'.join(next_one)}", file=sys.stderr)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
