"""Rows of every kind → tokens, with what is learned of them, and one error for each bad row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.sampling import LongSamples, TruncationSide
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.spec import InputAndTarget, Mixture, Objective, TaskSpec, Turns
from megatron_dynapipe.tools.prepare import tokenizer as tokenizers
from megatron_dynapipe.tools.prepare.encode import Encoder, status_of
from megatron_dynapipe.tools.prepare.settings import PrepareSettings, Skipped

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One turn a line."""
TURNS = [("system", "be"), ("user", "hi"), ("assistant", "yo"), ("user", "so"), ("assistant", "no"), ("user", "eh")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for every byte, and sentinels."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers.train_tokenizer([], 259 + 20, sentinels=20).save_pretrained(folder)
    return folder


def encoder(tokenizer: Path, task: TaskSpec, **changes: Any) -> Encoder:
    mixture = Mixture(tasks=(task,), chat_template=changes.pop("chat_template", CHAT))
    return Encoder(tokenizers.load_tokenizer(tokenizer), mixture, PrepareSettings(source="test", **changes))


def block(*rows: Any) -> Block:
    lines = b"\n\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    return Block(file="rows.jsonl", unit="line", first=1, lines=lines, done=0)


def texts(tokenizer: Path, encode: Encoder, *rows: Any) -> list[tuple[str, str, str]]:
    """(task, input, target) of every sample, back as text."""
    encoded = encode(block(*rows), 0)
    tokens = np.frombuffer(encoded.tokens, np.uint16)
    text = tokenizers.load_tokenizer(tokenizer)
    samples, at = [], 0
    for row in encoded.samples:
        end = at + row["input"] + row["target"]
        parts = text.decode(tokens[at : at + row["input"]]), text.decode(tokens[at + row["input"] : end])
        samples.append((encoded.texts[row["task"]], *parts))
        at = end
    assert at == len(tokens)
    return samples


@pytest.mark.parametrize(
    ("task", "rows", "expected"),
    [
        pytest.param(
            {"task_column": "kind", "columns": InputAndTarget(input="q", target="a")},
            [{"kind": "b", "q": "one", "a": "two", "more": 1}, {"kind": "a", "q": "☃", "a": "<pad>"}],
            [("b", "one", "two</s>"), ("a", "☃", "<pad></s>")],
            id="columns",
        ),
        pytest.param(
            {"name": "n", "template": "Q: {{ q | upper }} ||| {{ a[0].text }}"},
            [{"q": "one", "a": [{"text": "t"}]}],
            [("n", "Q: ONE", "t</s>")],
            id="a template",
        ),
        pytest.param(
            {"name": "n", "text": "t", "length": 4},
            [{"t": "abcdefg"}, {"t": "hijk"}, {"t": "lmnop"}],
            [("n", "a", "bcd"), ("n", "e", "fg</s>"), ("n", "h", "ijk</s>"), ("n", "l", "mnop</s>")],
            id="plain text for the next token",
        ),
        pytest.param(
            {"name": "n", "text": "t", "length": 4, "eos": False},
            [{"t": "abcdefg"}, {"t": "hi"}],
            [("n", "a", "bcd"), ("n", "e", "fg"), ("n", "h", "i")],
            id="plain text without ends",
        ),
        pytest.param(
            {"task_column": "task", "eos": False},
            [{"task": "a", "input": "x", "target": "</s>"}],
            [("a", "x", "</s>")],
            id="no ends",
        ),
    ],
)
def test_sources(tokenizer: Path, task: dict[str, Any], rows: list[Any], expected: list[tuple[str, str, str]]) -> None:
    assert texts(tokenizer, encoder(tokenizer, TaskSpec(source="x", **task)), *rows) == expected


def test_plain_text_with_spans_removed(tokenizer: Path) -> None:
    task = TaskSpec(name="n", source="x", text="t", length=20, objective=Objective.SPAN_CORRUPTION)
    ((_, given, wanted),) = texts(tokenizer, encoder(tokenizer, task), {"t": "abcdefghijklmnopqrst"})
    before, _, after = given.partition("<extra_id_0>")
    assert before + wanted.removeprefix("<extra_id_0>").removesuffix("</s>") + after == "abcdefghijklmnopqrst"


def test_conversations(tokenizer: Path) -> None:
    """The last turn of the assistant is the target, earlier ones are spans of the input."""
    task = TaskSpec(name="n", source="x", messages="m")
    row = {"m": [{"role": role, "content": content} for role, content in TURNS]}
    encode = encoder(tokenizer, task)
    given = "<system>be\n<user>hi\n<assistant>yo\n<user>so\n<assistant>"
    assert texts(tokenizer, encode, row) == [("n", given, "no\n")]
    ((sample, first, end),) = encode(block(row), 0).spans.tolist()
    assert (sample, given[first:end]) == (0, "yo\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "expected a tokenizer with a chat template for conversations, it has none"),
        (
            "{{ messages[-1].content }}{% if add_generation_prompt %}:{% endif %}",
            "line 1: expected a chat template that keeps earlier turns as they were, turn 2 changes them",
        ),
    ],
)
def test_chat_templates_that_cannot_be(tokenizer: Path, template: str | None, said: str) -> None:
    task = TaskSpec(name="n", source="x", messages="m", turns=Turns.ALL)
    row = {"m": [{"role": role, "content": content} for role, content in TURNS]}
    with pytest.raises(DataError, match=said):
        encoder(tokenizer, task, chat_template=template)(block(row), 0)


def test_long_conversations_lose_their_earliest_turns(tokenizer: Path) -> None:
    """The system's message stays, and so do headers and ends; what still does not fit is left out."""
    task = TaskSpec(name="n", source="x", messages="m")
    rows = [{"m": [{"role": role, "content": content} for role, content in TURNS]}, {"m": [
        {"role": "user", "content": "0123456789" * 10}, {"role": "assistant", "content": "z"}]}]  # fmt: skip
    whole = "<system>be\n<user>hi\n<assistant>yo\n<user>so\n<assistant>"
    shorter = "<system>be\n<user>so\n<assistant>"
    for most, given in ((len(whole), whole), (len(whole) - 1, shorter), (len(shorter), shorter)):
        limits = {"max_input_length": most, "long_samples": LongSamples.TRUNCATE, "truncate": TruncationSide.RIGHT}
        encode = encoder(tokenizer, task, **limits)
        assert texts(tokenizer, encode, *rows) == [("n", given, "no\n"), ("n", "", "")]
        encoded = encode(block(*rows), 0)
        assert encoded.samples["status"].tolist() == [int(given == shorter), status_of(Skipped.TOO_LONG)]
        learned = [given[first:end] for _, first, end in encoded.spans.tolist()]
        assert learned == (["yo\n"] if given == whole else [])
    limits = {"max_input_length": len(shorter) - 1, "long_samples": LongSamples.TRUNCATE}
    assert texts(tokenizer, encoder(tokenizer, task, **limits), rows[0]) == [("n", "", "")]


def test_truncated_pairs_keep_their_ends(tokenizer: Path) -> None:
    limits = {"max_input_length": 3, "max_target_length": 2, "long_samples": LongSamples.TRUNCATE}
    row = {"task": "a", "input": "abcdef", "target": "uvwxyz"}
    assert texts(tokenizer, encoder(tokenizer, PAIR, **limits), row) == [("a", "abc", "uv</s>")]


PAIR = TaskSpec(task_column="task", source="x")
CHATS = TaskSpec(name="n", source="x", messages="m")


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (PAIR, {"task": "a", "input": "x"}, "Object missing required field `target`"),
        (PAIR, {"task": "a", "input": 3, "target": "y"}, "Expected `str`, got `int` - at `$.input`"),
        (PAIR, {"task": " ", "input": "x", "target": "y"}, "expected the name of a task, got an empty one"),
        (PAIR, {"task": "a", "input": "", "target": "y"}, "expected every input to have at least 1 token"),
        (PAIR, {"task": "a", "input": "x", "target": ""}, "expected every target to have at least 1 token"),
        (PAIR, b"[1, 2]", "Expected `object`, got `array`"),
        (PAIR, b'{"task": ', "truncated"),
        (PAIR, b'{"task": "a", "input": "\xff", "target": "y"}', "utf-8"),
        (TaskSpec(name="n", source="x", template="{{ q }}|||{{ b }}"), {"q": "x"}, "'b' is undefined (it has q)"),
        (TaskSpec(name="n", source="x", template="{{ q.z.y }}|||a"), {"q": {}}, "a field that the row does not have"),
        (TaskSpec(name="n", source="x", template="{{ 1 / q }}|||a"), {"q": 0}, "the template cannot be rendered"),
        (CHATS, {"m": [{"role": "user"}]}, "line 3: message 0: expected content, got role"),
        (CHATS, {"m": [{"role": "user", "content": "hi"}]}, "expected a conversation with a turn of the assistant"),
        (TaskSpec(name="n", source="x", text="t"), {"t": ""}, "expected every input to have at least 1 token"),
    ],
)
def test_bad_rows(tokenizer: Path, task: TaskSpec, row: Any, message: str) -> None:
    good: dict[str, Any] = {"task": "a", "input": "x", "target": "y", "q": "x", "b": "y", "t": "text"}
    if task.template is not None and "/" in str(task.template):
        good["q"] = 1
    if task.template is not None and "z" in str(task.template):
        good["q"] = {"z": {"y": 1}}
    good["m"] = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
    with pytest.raises(DataError) as caught:
        encoder(tokenizer, task)(block(good, row), 0)
    assert message in caught.value.message
    assert caught.value.message.startswith("rows.jsonl, line 3")  # a blank line stands between


def test_a_large_sample(tokenizer: Path) -> None:
    """A very long sample is text like others, for the policy on long samples to decide on."""
    row = {"task": "a", "input": "word " * 50_000, "target": "y"}
    limits = {"max_input_length": 100, "max_target_length": 10}
    with pytest.raises(DataError, match=r"line 1 \(task 'a'\): expected samples of at most 100 input tokens and 10 ta"):
        encoder(tokenizer, PAIR, **limits)(block(row), 0)
    kept = texts(tokenizer, encoder(tokenizer, PAIR, **limits, long_samples=LongSamples.TRUNCATE), row)
    assert kept == [("a", ("word " * 20), "y</s>")]
