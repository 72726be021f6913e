"""The documents keep to what CONTRIBUTING says of their size and language, and the script that counts can fail."""

import ast
import io
import re
import runpy
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.printed import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "count_docs.py"))
EXAMPLES = {
    "of which": "Three runs, of which two are of stages, ended.",
    "those of": "The losses are those of one process.",
    "what …, is": "What would train nothing, or something else, is an error.",
    "beside": "It takes 0.4 ms beside 5.5 ms.",
    "held against": "Tests hold the answer against planning everything.",
    "Where …, for If": "Where neither a cluster nor memory is named, they are today's.",
    "gone through": "The lengths before it are gone through.",
    "costs are of": "They are today's nodes with the device that costs are of.",
    "of one's own": "A training loop of one's own is possible.",
    "as of": "Arguments and errors as of `verify`.",
    "is left of": "What is left of a pass runs later.",
}


def test_make_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        SCRIPT["main"]()
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPT["TURNS"])
def test_a_forbidden_turn_is_found(name: str) -> None:
    (turn,) = SCRIPT["turns_of"](EXAMPLES[name])
    assert turn.startswith(repr(name))


def texts_of(code: str) -> Iterator[tuple[int, str]]:
    """What a file's readers read, by line: errors, hints, lines of the log, helps, docstrings and comments.

    Lines lose their indent, which would make code of them.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, "\n".join(line.strip() for line in node.value.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def test_the_package_has_no_forbidden_turn() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {turn}"
        for path in sorted((ROOT / "megatron_dynapipe").rglob("*.py"))
        for line, text in texts_of(path.read_text())
        for turn in SCRIPT["turns_of"](text)
    ]
    assert not found, "\n".join(found)


def test_docstrings_and_comments_are_read() -> None:
    code = 'def f():\n    """A b.\n\n    Args:\n        b: those of c.\n    """\n    # beside it\n    say("of which")\n'
    assert {line for line, text in texts_of(code) if [*SCRIPT["turns_of"](text)]} == {2, 7, 8}


def test_code_quotes_and_targets_of_links_are_no_prose() -> None:
    text = 'See `beside`, "beside" and [it](beside.md).\n\n```\nbeside\n```\n\n    beside this\n        and that\n'
    assert not [*SCRIPT["turns_of"](text.replace("beside.md", "other.md"))]
    assert SCRIPT["words"](text) == 5


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_a_page_opens_with_an_example(page: Path) -> None:
    """Before its first heading, but for pages that are entrances, or tables of words and rooms."""
    opening = page.read_text().partition("\n## ")[0]
    entrances = {"index.md", "quick-start.md", "how-do-i.md", "glossary.md", "design.md"}
    assert bool(SCRIPT["CODE"].search(opening)) or page.name in entrances


def test_contributing_has_an_example_of_every_turn() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## How we write\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| \"", section, re.MULTILINE)) == 12
    found = {name for line in section.splitlines() for name in SCRIPT["TURNS"] if has_turn(line, name)}
    assert found == SCRIPT["TURNS"].keys()


def has_turn(row: str, name: str) -> bool:
    return bool(SCRIPT["TURNS"][name].search(row.partition(" | ")[0].replace("| ", "").strip('"')))
