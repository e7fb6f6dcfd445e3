"""Checks that every relative link and anchor in the repository's Markdown leads somewhere; prints those that do not.

python docs/links.py
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[`~]* *$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def pages() -> list[Path]:
    below = (page for folder in ("configs", "docs", "launch", "tests") for page in (ROOT / folder).rglob("*.md"))
    return sorted([*ROOT.glob("*.md"), *below])


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that hosting sites make of a page's headings."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?)[ #]*$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        kept = (one for one in words if one in "-_ " or unicodedata.category(one)[0] in "LN")
        name = "".join(kept).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def dead(page: Path) -> list[str]:
    """A line for each link of `page` that leads nowhere."""
    lines = []
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    for number, line in enumerate(text.splitlines(), start=1):
        for target in LINK.findall(INLINE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            where = f"{page.relative_to(ROOT)}:{number}: {target}"
            if not found.exists():
                lines.append(f"{where}: there is no such file")
            elif anchor and found.suffix == ".md" and anchor not in anchors(found):
                lines.append(f"{where}: {found.name} has no heading with this anchor")
    return lines


def main() -> int:
    found = [line for page in pages() for line in dead(page)]
    print("\n".join(found), end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
