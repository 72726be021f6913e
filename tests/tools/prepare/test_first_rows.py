"""What is found before a tokenizer is trained or a gigabyte is read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.tools.mixture.sources import open_sources
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import PrepareSettings, prepare_mixture, run
from megatron_dynapipe.tools.prepare import tokenizer as tokenizers

PAIR = {"task": "a", "input": "one two three", "target": "four five"}
CHAT = {"m": [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]}


def refused(
    folder: Path, task: dict[str, Any], *parts: list[Any] | str, template: str | None = None, **changes: Any
) -> DynaPipeError:
    """The error of rows (or a text) in some files, by a run that may do nothing that takes long."""
    for at, rows in enumerate(parts):
        text = rows if isinstance(rows, str) else "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{at}.jsonl").write_text(text)
    names = tuple(f"{at}.jsonl" for at in range(len(parts)))
    mixture = Mixture(tasks=(TaskSpec(**{"source": names} | task),), chat_template=template)
    settings = PrepareSettings(source="test", **changes)
    with pytest.raises(DynaPipeError) as caught:
        prepare_mixture(mixture, open_sources(mixture, folder), folder / "data", settings)
    assert not (folder / "data").exists() and not (folder / ".data.prepare").exists()
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that takes long may begin."""

    def begin(*_: Any) -> None:
        raise AssertionError("training begins")

    monkeypatch.setattr(run, "make_tokenizer", begin)
    monkeypatch.setattr(run, "_recipe", begin)


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ({"task_column": "task"}, {"task": "a", "input": "x"}, "missing required field `target`"),
        ({"task_column": "task"}, PAIR | {"task": "a\x1b[2J"}, "name of printable characters, got 'a\\x1b[2J'"),
        ({"name": "a", "template": "{{ q }}|||{{ input }}"}, PAIR, "names a field that the row does not have"),
        ({"name": "a", "messages": "m"}, {"m": CHAT["m"][:1]}, "expected a conversation with a turn of the assistant"),
    ],
)
def test_rows_of_every_file_are_looked_at(tmp_path, no_training, task, row, said) -> None:
    good = {**PAIR, **CHAT, "q": "one", "a": "two", "body": "three"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    message = refused(tmp_path, task, [good] * 30, [good, row], template=template).message
    assert said in message and "1.jsonl, line 2" in message


def test_a_missing_chat_template_and_a_given_tokenizer(tmp_path: Path, no_training: None) -> None:
    task = {"name": "a", "messages": "m"}
    error = refused(tmp_path, task, [CHAT])
    none = "expected a chat template for conversations, a tokenizer that is trained on their text has none"
    assert none in error.message and error.hint.startswith("pass --tokenizer of a chat model")
    tokenizers.train_tokenizer([], 259).save_pretrained(tmp_path / "tokenizer")
    message = refused(tmp_path, task, [CHAT], tokenizer=tmp_path / "tokenizer").message
    assert "expected a tokenizer with a chat template for conversations, it has none" in message
    message = refused(tmp_path, task, [CHAT], template="{{ messages[-1].content }}{{ 1 / 0 }}").message
    assert "line 1: the chat template refuses the conversation: division by zero" in message
    pair = {"task_column": "task"}
    message = refused(tmp_path, pair, [PAIR], tokenizer=tmp_path / "tokenizer", max_input_length=5).message
    assert "line 1 (task 'a'): expected samples of at most 5 input tokens, this one has 13 and 9" in message


def test_files_that_cannot_be_read(tmp_path: Path, no_training: None) -> None:
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    said = refused(tmp_path, {"name": "a", "source": "damaged.parquet"})
    assert "damaged.parquet: cannot read it" in said.message


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 10**15 }}", "{{ " + "1" * 5000 + " }}", "{{ x", "{{ " + "(" * 5000 + " }}"]
)
def test_templates_that_are_none(tmp_path: Path, no_training: None, template: str) -> None:
    said = refused(tmp_path, {"name": "a", "template": template + "|||y"}, [PAIR])
    assert re.search("expected a Jinja template|the template cannot be", said.message)


@pytest.mark.parametrize(
    "row",
    [
        '{"task": "a", "target": "x", "input": ' + "[" * 100_000,
        '{"deep": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"input": ' + "9" * 5000 + "}",
    ],
)
@pytest.mark.parametrize("template", [None, "{{ deep }}{{ input }}|||y"])
def test_rows_of_no_end_are_one_line(tmp_path: Path, no_training: None, row: str, template: str | None) -> None:
    said = refused(tmp_path, {"name": "a", "template": template}, f"{row}\n")
    assert "0.jsonl, line 1: " in said.message
