"""One word, one thing: names in the code that would give a word of docs/glossary.md a second meaning."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_dynapipe"


class Rule(NamedTuple):
    """Names that a word must not lend itself to.

    Attributes:
        word: in the glossary's section "Words with one meaning".
        folders: below the package; "" for all of it.
        names: what a whole name must not be.
        instead: what such things are called.
    """

    word: str
    folders: tuple[str, ...]
    names: str
    instead: str


RULES = (
    Rule("adaptive", ("costing", "ways", "choosing", "megatron/profiling"), r"[Aa]daptive\w*", "refined, searched"),
    Rule("begin", ("core", "ways", "choosing", "tools/tuning"), r"_?[Bb]egun|_?[Bb]eginnings?", "start"),
    Rule("divide", ("cli", "data", "modules", "sampling", "service", "tools"), r"_?divided|[Dd]ivision", "part, shard"),
    Rule("layout", ("core", "ways", "choosing", "data", "tools/rivals"), r"layouts", "batch_layouts"),
    Rule("link", ("ways", "report", "tools/rivals", "sampling"), r"\w*links?", "chain, bundle"),
    Rule("split", ("",), r"Split|(even|parse|best|other)_split", "LayerSplit, even_layer_split"),
)
OF_THE_SEARCH = r"(?<!\w)(links?|begin_\w+|Begun)\("
"""Functions that `csrc/search` must not have: chained micro-batches are bundles, and a search has starts."""


def names(path: Path) -> Iterator[tuple[int, str]]:
    """The names of a file with their lines, but for attributes, which other libraries may have named."""
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME and before != ".":
            yield token.start[0], token.string
        before = token.string


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.word)
def test_no_word_has_a_second_meaning(rule: Rule) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in rule.folders
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for line, name in names(path)
        if re.fullmatch(rule.names, name)
    ]
    assert not found, f"{rule.word} means something else (docs/glossary.md); say {rule.instead}:\n" + "\n".join(found)


def test_no_word_of_the_search_has_a_second_meaning() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "csrc" / "search").iterdir())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(OF_THE_SEARCH, line)
    ]
    assert not found, "\n".join(found)


def test_a_name_is_found_and_a_method_of_another_library_is_not(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("even_split = 'split'.split(',')\nvalue.layouts = layouts\n")
    assert list(names(path)) == [(1, "even_split"), (2, "value"), (2, "layouts")]


def test_the_glossary_says_which_meaning_a_word_has() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = glossary.partition("## Words with one meaning")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\w+) \|", section, flags=re.MULTILINE) == ["word", *(rule.word for rule in RULES)]
