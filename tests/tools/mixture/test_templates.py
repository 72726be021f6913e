"""Templates end, and make the same text at every reading."""

import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture import templates
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.row_reader import read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.spec import InputAndTarget, Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import PrepareSettings
from megatron_dynapipe.tools.prepare.encode import Encoder
from megatron_dynapipe.tools.prepare.tokenizer import load_tokenizer
from tests.helpers.chat_models import chat_tokenizer, saved

ENDLESS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}": "more than 0.3 s",
    "{% for a in long %}{% for b in long if b > a %}{% for c in long %}{% endfor %}{% endfor %}{% endfor %}": "0.3 s",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}": "more than 0.3 s",
    "{{ ((long ~ ' ') * 99999) | wordwrap(1) | length }}": "it takes more than 0.3 s",
    "{{ range(99999) | map('string') | map('center', 9999) | select('in', long * 99) | list }}": "more than 0.3 s",
    "{{ long * 99999999 }}": "more than 1 GB",
    "{{ '%9999999999d' % long | length }}": "more than 1 GB",
    "{{ long.ljust(9999999999) }}": "more than 1 GB",
    "{{ ([long * 9999] * 9999) | join }}": "more than 1 GB",
    "{{ (9 if long) ** 99999999 }}": "it takes more than 0.3 s",
    "{{ lipsum(n=100000) }}": "'lipsum' is undefined",
}


def block(*rows: dict) -> Block:
    lines = b"\n".join(msgspec.json.encode(row) for row in rows)
    return Block(file="rows.jsonl", unit="line", first=1, lines=lines, done=0)


def rows_of(template: str, block: Block) -> list[tuple[int, tuple]]:
    spec = TaskSpec(name="n", source="x", template=template)

    def refuse(number, error):
        raise row_error(block, number, error, spec) from error

    read = row_reader(spec)
    with templates.bounded():
        return list(read_rows(block, read, refuse))


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_an_error_of_its_row(monkeypatch, template: str) -> None:
    """Whatever loops, calls, operators and filters do; the process is as it was afterwards."""
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.3)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    template_of_long = f"{{% if long %}}{template}{{% endif %}}|||a"
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: ") as caught:
        rows_of(template_of_long, block({"long": ""}, {"long": "abc" * 300}))
    assert ENDLESS[template] in caught.value.message and "\n" not in caught.value.message
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0) and signal.getsignal(signal.SIGPROF) is signal.SIG_DFL


@pytest.mark.parametrize("template", [name for name in ENDLESS if "lipsum" not in name])
def test_so_is_a_chat_template(monkeypatch, tmp_path, template: str) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.3)
    folder = saved(tmp_path, chat_tokenizer(), f"{{% set long = 'abc' * 300 %}}{template}{{{{ messages[0].content }}}}")
    spec = TaskSpec(name="n", source="x", messages="m")
    encode = Encoder(load_tokenizer(folder), Mixture(tasks=(spec,)), PrepareSettings(source="test"))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: the chat template refuses") as caught:
        encode(block({"m": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}), 0)
    assert ENDLESS[template] in caught.value.message or "Range too big" in caught.value.message


def test_every_row_has_the_whole_bound(monkeypatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.3)
    template = "{% for i in range(30000) %}{% endfor %}{{ text }}\n|||{{ text }}"
    rows = [values for _, values in rows_of(template, block(*[{"text": "ab"}] * 200))]
    assert rows == [("n", "ab", "ab")] * 200


def test_other_threads_read_rows_without_an_alarm() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(rows_of, "{{ a }}|||b", block({"a": "x"})).result() == [(1, ("n", "x", "b"))]


def test_a_templates_last_newline_is_kept() -> None:
    """For a decoder-only model nothing else stands between input and target; white space around ||| goes."""

    def texts(template):
        spec = TaskSpec(name="n", source="x", template=template)
        return row_reader(spec)(b'{"q": "2 + 3", "a": "5"}')[1:]

    assert texts(InputAndTarget(input="Q: {{ q }}\nA:\n", target="{{ a }}\n\n")) == ("Q: 2 + 3\nA:\n", "5\n\n")
    assert texts("Q: {{ q }}\n ||| {{ a }}\n") == ("Q: 2 + 3", "5")


def test_random_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a Jinja template: random gives another text at every reading"):
        row_reader(TaskSpec(name="n", source="x", template="{{ [1, 2] | random }}|||a"))
