"""What this project prints for people to run: in pages, in the heads of files, in errors, hints and logs."""

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.docs.workspace import PROGRAM, ROOT

BENCHMARKS = (
    "benchmarks/**/README.md",
    "benchmarks/gpu/notes.md",
    "benchmarks/tuning/figures.md",
    "benchmarks/planning/trainers.md",
)
PAGES = ("README.md", "CONTRIBUTING.md", "patches/README.md", "tests/README.md", "docs/**/*.md", *BENCHMARKS)
HEADS = ("configs/**/*.yaml", "examples/**/*", "scripts/*.py", "pretrain_*.py", "megatron_dynapipe/clusters/*.yaml")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_START = rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAM} |torchrun |python3? |pip |make |git |\.venv/bin/)"
_INDENTED = re.compile(rf"^    ({_START}.*\n(?: {{4,}}\S.*\n)*)", re.MULTILINE)
_INLINE = re.compile(rf"`({_START}[^`]*)`")
_HEAD = re.compile(rf"^[#\s]*({_START}(?:.*\\\n)*.*)$", re.MULTILINE)
_STRING = re.compile(rf"`({_START}[^`]*)`|(?<!\S)((?:pip install|torchrun) .*)$")
_NAME = re.compile(rf"({PROGRAM}|torchrun|make|pip)( [a-z-]+)*")
"""A program or command, without arguments: a name, no line to run."""


def printed(but_fences_of: Collection[str]) -> dict[str, str]:
    """Commands, a block of them as one text, and the first place of each; but for fenced blocks of some pages."""
    pages: dict[str, str] = {}
    for place, text in (*_in_pages(but_fences_of), *_in_heads(), *_in_strings()):
        lines = re.sub(r"\s*\\\n[#\s]*", " ", text).strip()
        if not _NAME.fullmatch(lines):
            pages.setdefault(re.sub(r"\n +", "\n", lines), place)
    return pages


def _files(patterns: tuple[str, ...]) -> Iterator[Path]:
    paths = (path for pattern in patterns for path in sorted(ROOT.glob(pattern)) if path.is_file())
    return (path for path in paths if path.parent.name != "__pycache__")


def _in_pages(but_fences_of: Collection[str]) -> Iterator[tuple[str, str]]:
    for path in _files(PAGES):
        page = str(path.relative_to(ROOT))
        text = path.read_text()
        if page not in but_fences_of:
            yield from ((page, block) for _, block in FENCE.findall(text) if re.match(_START, block))
        rest = FENCE.sub("", text)
        yield from ((page, command) for command in _INDENTED.findall(rest))
        yield from ((page, " ".join(command.split())) for command in _INLINE.findall(_INDENTED.sub("", rest)))


def _in_heads() -> Iterator[tuple[str, str]]:
    for path in _files(HEADS):
        yield from ((str(path.relative_to(ROOT)), command) for command in _HEAD.findall(path.read_text()))


def _in_strings() -> Iterator[tuple[str, str]]:
    """Of the package, with `{}` for what a message fills in; docstrings are no messages."""
    for path in _files(("megatron_dynapipe/**/*.py",)):
        tree = ast.parse(path.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inside | documents:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            for quoted, whole in _STRING.findall(text):
                yield str(path.relative_to(ROOT)), quoted or whole
