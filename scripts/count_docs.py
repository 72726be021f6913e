"""Counts the pages and words of the documents and finds forbidden turns: exit status 1 if any is more than its bound.

    python scripts/count_docs.py

A word has a letter or a digit and stands outside of code blocks and of links' targets. The reference of commands and
flags is written from the parsers' help: it counts as a page, and its words are the parsers'. CONTRIBUTING ("How we
write") has an example for each turn.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATED = ("commands.md",)
AROUND = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "patches/*.md", "tests/*.md", "benchmarks/**/*.md")
"""More pages in which turns are forbidden, but not words counted."""
BOUNDS: Mapping[str, int] = {"pages": 24, "words": 24_000, "forbidden turns": 0}
"""The most of each: raise none without saying here why."""
TURNS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        "of which": r"\bof which\b",
        "those of": r"\b[Tt]hose of\b",
        "what …, is": r"(?:^|[.;:] )What [^.?|]*, (?:is|are)\b",
        "beside": r"\b[Bb]esides?\b",
        "held against": r"\bh[oe]ld(?:s|ing)?\b[^.|]{0,60}\bagainst\b",
        "Where …, for If": r"(?:^|[.;:] |\| )Where [^.?|`]*, ",
        "gone through": r"\bgone through\b",
        "costs are of": r"\b(?:costs?|times?|figures?) (?:is|are|was|were) of\b",
        "of one's own": r"\bone's own\b",
        "as of": r"\bas of\b",
        "is left of": r"\bis left of\b",
    }.items()
}
CODE = re.compile(r"^```[\s\S]*?^```$|^    \S.*\n(?: {4,}\S.*\n)*", re.MULTILINE)
LINK_TARGET = re.compile(r"\]\([^)]*\)")


def main() -> None:
    """Print every count and its bound, and every forbidden turn with its page."""
    pages = sorted(DOCS.rglob("*.md"))
    around = (page for pattern in AROUND for page in sorted(ROOT.glob(pattern)))
    turns = [turn for page in (*pages, *around) for turn in forbidden(page)]
    for turn in turns:
        print(turn)
    counted = {
        "pages": len(pages),
        "words": sum(words(page.read_text(encoding="utf-8")) for page in pages if page.name not in GENERATED),
        "forbidden turns": len(turns),
    }
    for name, bound in BOUNDS.items():
        above = "  <-- above" if counted[name] > bound else ""
        print(f"{name:30} {counted[name]:>6} of {bound}{above}")
    sys.exit(any(counted[name] > bound for name, bound in BOUNDS.items()))


def words(text: str) -> int:
    """The number of words that a page has to be read for."""
    prose = LINK_TARGET.sub("]", CODE.sub("", text))
    return sum(re.search(r"\w", word) is not None for word in prose.split())


def forbidden(page: Path) -> Iterator[str]:
    """The forbidden turns of a page, each as `page: turn: the words around it`."""
    name = page.relative_to(ROOT)
    yield from (f"{name}: {turn}" for turn in turns_of(page.read_text(encoding="utf-8")) if page.name not in GENERATED)


def turns_of(text: str) -> Iterator[str]:
    """The forbidden turns of a text, with the words around each; text in quotes is an example."""
    prose = re.sub(r"\"[^\"\n]*\"|`[^`\n]*`", '""', CODE.sub("", text))
    for name, pattern in TURNS.items():
        for turn in pattern.finditer(prose):
            around = prose[max(turn.start() - 30, 0) : turn.end() + 30]
            yield f"{name!r} in …{' '.join(around.split())}…"


if __name__ == "__main__":
    main()
