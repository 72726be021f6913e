"""Templates end, and make the same text at every reading."""

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture import templates
from megatron_dynapipe.tools.mixture.fields import read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import TaskSpec

ENDLESS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}": "turns of loops and calls",
    "{% for a in long %}{% for b in long if b > a %}{% endfor %}{% endfor %}": "turns of loops and calls",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": "turns of loops and",
    "{{ 'x' * 999999999 }}": "* would give more than",
    "{{ 999999999 * long }}": "* would give more than",
    "{{ 9 ** 999999999 }}": "** would give more than",
    "{{ lipsum(n=100000) }}": "'lipsum' is undefined",
}


def block(*rows: dict) -> Block:
    lines = b"\n".join(msgspec.json.encode(row) for row in rows)
    return Block(file="rows.jsonl", unit="line", first=1, lines=lines, done=0)


def rows_of(template: str, block: Block) -> list[tuple[int, tuple]]:
    spec = TaskSpec(name="n", source="x", template=template)

    def refuse(number, error):
        raise row_error(block, number, error, spec) from error

    return list(read_rows(block, row_reader(spec), refuse))


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_an_error_of_its_row(monkeypatch, template: str) -> None:
    monkeypatch.setattr(templates, "MOST_STEPS", 10_000)
    template_of_long = f"{{% if long %}}{template}{{% endif %}}|||a"
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: ") as caught:
        rows_of(template_of_long, block({"long": ""}, {"long": "abc" * 300}))
    assert ENDLESS[template] in caught.value.message and "\n" not in caught.value.message


def test_a_template_that_takes_too_long_is_one_too(monkeypatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", -1.0)
    with pytest.raises(DataError, match="line 1: the template cannot be rendered: it does not end within -1 s"):
        rows_of("{% for c in text %}{{ c }}{% endfor %}|||a", block({"text": "abc"}))


def test_every_row_has_the_whole_bound(monkeypatch) -> None:
    monkeypatch.setattr(templates, "MOST_STEPS", 1000)
    text = "{% for c in text %}{{ loop.index }}{{ c * 2 }}{% else %}none{% endfor %}"
    template = f"{text}|||{{{{ 2 ** 3 * [1, 2] | length }}}}"
    rows = [values for _, values in rows_of(template, block(*[{"text": "ab"}] * 800, {"text": ""}))]
    assert rows[0] == rows[799] == ("n", "1aa2bb", "16") and rows[800] == ("n", "none", "16")


def test_random_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a Jinja template: random gives another text at every reading"):
        row_reader(TaskSpec(name="n", source="x", template="{{ [1, 2] | random }}|||a"))
