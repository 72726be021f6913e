"""What conversations, pairs and texts teach, held against transformers and against a slow reading by characters."""

import datetime
import json
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from megatron_dynapipe.cli.main import main as cli
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily, Shape
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.meta import open_split
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.sources import open_sources, rows_source
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec, Turns
from megatron_dynapipe.tools.prepare import BadRows, PrepareSettings, prepare_mixture
from megatron_dynapipe.tools.prepare.encode import EncodedRows, Encoder
from megatron_dynapipe.tools.prepare.rendering import DATE
from megatron_dynapipe.tools.prepare.text_encoder import SlowEncoded, TextEncoder
from megatron_dynapipe.tools.prepare.tokenizer import load_tokenizer
from megatron_dynapipe.tools.taught import taught_samples
from tests.helpers import lists
from tests.helpers.chat_models import AROUND, PRE, TEMPLATES, chat_tokenizer, saved
from tests.helpers.examples import examples

type Sample = tuple[list[int], list[int]]
"""Tokens of a decoder-only sample, and 1 for each that counts."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: saved(root / kind, chat_tokenizer(kind, "both")) for kind in PRE}


def encoded(folder: Path, rows: list[Any], *, template: str | None = None, **task: Any) -> EncodedRows:
    spec = TaskSpec(**{"name": "n", "source": "x", "messages": "messages"} | task)
    mixture = Mixture(tasks=(spec,), chat_template=template)
    encode = Encoder(load_tokenizer(folder), mixture, PrepareSettings(source="test"))
    lines = b"\n".join(json.dumps(row).encode() for row in rows)
    return encode(Block(file="rows.jsonl", unit="line", first=1, lines=lines, done=0), 0)


def samples(block: EncodedRows) -> list[Sample]:
    """A block's samples as a decoder-only model has them."""
    left, found = np.frombuffer(block.tokens, np.uint16).tolist(), []
    for number, (given, wanted, after) in enumerate(block.samples[["input", "target", "input_end"]].tolist()):
        tokens, left = left[: given + wanted], left[given + wanted :]
        learned = [0] * given + [1] * wanted
        for sample, first, end in block.spans.tolist():
            if sample == number:
                learned[first:end] = [1] * (end - first)
        found.append((tokens[: given - after] + tokens[given:], learned[: given - after] + learned[given:]))
    return found


def dialogue(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]} | more


def by_characters(tokenizer: Any, text: str, parts: list[tuple[int, int]]) -> Sample:
    """Tokens of a rendered text up to the last that counts, and those that touch a part of it, one by one."""
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        int(any(start < end and stop > first for first, end in parts)) for start, stop in whole["offset_mapping"]
    ]
    length = max((at + 1 for at, counts in enumerate(learned) if counts), default=0)
    return whole["input_ids"][:length], learned[:length]


STOPS = {
    "end after each turn": "<|end|>", "header by role": "</s>", "stop of the next role": "<|c|>", "words alone": "\n",
    "alternating": "</s>", "rewritten": "<|end|>", "dated": "<|end|>", "marked": "<|end|>",
}  # fmt: skip
"""What follows an answer, its stop token at the end of it."""

words = st.text("abzfox the.,!?\né☃", min_size=1, max_size=8).filter(str.strip)


@pytest.mark.parametrize("kind", PRE)
@pytest.mark.parametrize("structure", [name for name in TEMPLATES if name != "rewritten"])
@hypothesis.settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@hypothesis.given(turns=st.lists(words, min_size=1, max_size=3))
def test_conversations(folders: dict[str, Path], kind: str, structure: str, turns: list[str]) -> None:
    """Ids are those of the whole text as the template writes it; what counts are answers with what ends them."""
    tokenizer = load_tokenizer(folders[kind])
    texts = [text for at, answer in enumerate(turns) for text in (f"q{at}", f"Answer{at}{answer}")]
    row = dialogue(*texts)
    template = TEMPLATES[structure].replace("strftime_now('%d %b %Y')", f"'{DATE:%d %b %Y}'")
    text = tokenizer.apply_chat_template(row["messages"], chat_template=template, tokenize=False)
    parts, at = [], 0
    for answer in texts[1::2]:
        first = text.index(answer.strip(), at) - (0 if structure != "alternating" else 1)
        first -= len(answer) - len(answer.lstrip())
        at = first + len(answer)
        stop = text.find(STOPS[structure], at)
        parts.append((first - (structure == "words alone"), at if stop < 0 else stop + len(STOPS[structure])))
    block = encoded(folders[kind], [row], template=TEMPLATES[structure])
    assert samples(block) == [by_characters(tokenizer, text, parts)]
    whole = tokenizer.apply_chat_template(row["messages"], chat_template=template)["input_ids"]
    assert samples(block)[0][0] == whole[: len(samples(block)[0][0])]
    unended = {"words alone": len(turns), "stop of the next role": 1}.get(structure, 0)
    assert sum(count for remark, count in block.remarks.items() if "no special token" in remark) == unended


def test_a_slow_tokenizer_gives_the_same(folders: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Without the places of tokens, beginnings of the text are encoded; where those differ, that is an error."""
    row = dialogue("hi", "Yes.", "so?", "No!")
    template = TEMPLATES["end after each turn"]
    fast = samples(encoded(folders["byte"], [row], template=template))
    monkeypatch.setattr(TextEncoder, "rendered", slowly)
    assert samples(encoded(folders["byte"], [row], template=template)) == fast
    merged = "{% for m in messages %}{{ 'x' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    merged += "{% if add_generation_prompt %}x{% endif %}"
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.add_tokens(["xY"])
    folder = saved(tmp_path / "tokenizer", tokenizer)
    with pytest.raises(DataError, match=r"line 1: expected a tokenizer that encodes the first 3 characters alone"):
        encoded(folder, [row], template=merged)


def slowly(encoder: TextEncoder, texts: list[str]) -> list[SlowEncoded]:
    return [
        SlowEncoded(text, lambda part: encoder.tokenizer(part, add_special_tokens=False)["input_ids"]) for text in texts
    ]


def shown(folder: Path, block: EncodedRows) -> list[str]:
    """Samples as text, with what counts in brackets."""
    tokenizer = load_tokenizer(folder)
    texts = []
    for tokens, learned in samples(block):
        pairs = groupby(zip(learned, tokens, strict=True), itemgetter(0))
        runs = [(counts, [token for _, token in run]) for counts, run in pairs]
        texts.append("".join(f"[{tokenizer.decode(run)}]" if counts else tokenizer.decode(run) for counts, run in runs))
    return texts


CALL = {"type": "function", "function": {"name": "t", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("structure", "row", "task", "expected"),
    [
        pytest.param(
            "end after each turn",
            dialogue("q", "wrong", "sure?", "right") | {"tools": [{"type": "function"}]},
            {},
            ['<s><|tool|>[{"type": "function"}]\n<|b|>user\nq<|end|>\n<|b|>assistant\n[wrong<|end|>]\n<|b|>user\nsure?'
             "<|end|>\n<|b|>assistant\n[right<|end|>]"],
            id="tools",
        ),
        pytest.param(
            "end after each turn",
            {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "name": "t", "content": "4"},
                {"role": "assistant", "content": "four"},
            ]},
            {},
            ['<s><|b|>user\nq?<|end|>\n<|b|>assistant\n[<|tool|>{"name": "t", "arguments": {"a": 1}}<|end|>]\n'
             "<|b|>tool\n4<|end|>\n<|b|>assistant\n[four<|end|>]"],
            id="a call, and content in parts",
        ),
        pytest.param(
            "header by role",
            {"messages": json.dumps([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])},
            {},
            ["<|c|>q<|a|>\n[a</s>]"],
            id="ShareGPT's names, as JSON text",
        ),
        pytest.param(
            "header by role",
            {"messages": [
                {"role": "user", "content": "q"}, {"role": "assistant", "content": "no", "weight": 0},
                {"role": "assistant", "content": "yes", "train": True}, {"role": "user", "content": "bye"},
                {"role": "assistant", "content": "bye", "loss": 0.0},
            ]},
            {},
            ["<|c|>q<|a|>\nno</s><|a|>\n[yes</s>]"],
            id="answers that are not to be learned, and two in a row",
        ),
        pytest.param(
            "header by role", dialogue("", "a")["messages"][1:], {}, ["<|a|>\n[a</s>]"], id="the assistant begins"
        ),
        pytest.param(
            "marked", dialogue("q", "a", "r", "b"), {"turns": "last"},
            ["<s><|b|>user\nq<|end|><|b|>assistant\na<|end|><|b|>user\nr<|end|><|b|>assistant\n[b<|end|>]"],
            id="the last turn of marks",
        ),
        pytest.param(
            "header by role", dialogue("q", "a", "r", "b"), {"turns": "each"},
            ["<|c|>q<|a|>\n[a</s>]", "<|c|>q<|a|>\na</s><|c|>r<|a|>\n[b</s>]"], id="each turn",
        ),
        pytest.param(
            "stop of the next role", dialogue("q", "a", "r", "b"), {},
            ["<s><|c|>user q<|a|>\n[a<|c|>]user r<|a|>\n[b]"], id="the next role's stop",
        ),
        pytest.param(
            "stop of the next role", dialogue("q", "a", "r", "b"), {"eos": True},
            ["<s><|c|>user q<|a|>\n[a<|c|>]user r<|a|>\n[b</s>]"], id="an end that the template lacks",
        ),
        pytest.param(
            "header by role", dialogue("q", "a"), {"eos": True}, ["<|c|>q<|a|>\n[a</s>]"], id="an end, once"
        ),
        pytest.param(
            "rewritten", dialogue("q", "a", "r", "b"), {},
            ["<|b|>user\nq<|end|>\n<|b|>assistant\n<think>\n\n</think>\n\n[a<|end|>]",
             "<|b|>user\nq<|end|>\n<|b|>assistant\na<|end|>\n<|b|>user\nr<|end|>\n<|b|>assistant\n<think>\n\n</think>\n\n"
             "[b<|end|>]"],
            id="a template that rewrites",
        ),
        pytest.param(
            "rewritten", dialogue("q", "a"), {"empty_thoughts": True},
            ["<|b|>user\nq<|end|>\n<|b|>assistant\n[<think>\n\n</think>\n\na<|end|>]"], id="empty thoughts on request",
        ),
        pytest.param(
            "rewritten",
            {"messages": [
                {"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
            {},
            ["<|b|>user\nq<|end|>\n<|b|>assistant\n[<think>\nhm\n</think>\n\na<|end|>]"], id="a thought",
        ),
        pytest.param(
            "dated", dialogue("q", "a"), {"date": datetime.date(2024, 2, 29)},
            ["<s>Today: 29 Feb 2024\n<|b|>user\nq<|end|><|b|>assistant\n[a<|end|>]"], id="the date of the recipe",
        ),
    ],
)  # fmt: skip
def test_rows_of_every_kind(
    folders: dict[str, Path], structure: str, row: Any, task: dict[str, Any], expected: list[str]
) -> None:
    row = {"messages": row} if isinstance(row, list) else row
    task = task | ({"turns": Turns(task["turns"])} if "turns" in task else {})
    block = encoded(folders["byte"], [row], template=TEMPLATES[structure], **task)
    assert shown(folders["byte"], block) == expected


@pytest.mark.parametrize(
    ("structure", "row", "remark"),
    [
        ("header by role", dialogue("q", "a", tools=[{"type": "function"}]), "conversations with 'tools'"),
        ("header by role", [{"role": "user", "content": "q", "mood": "?"}, {"role": "assistant", "content": "a"}],
         "messages with 'mood'"),
        ("header by role", [{"role": "user", "content": "q", "train": 1}, {"role": "assistant", "content": "a"}],
         "messages of other roles that are marked"),
        ("rewritten", dialogue("q", "a", "r", "b"), "a sample for each answer (turns: each)"),
        ("rewritten", dialogue("q", "a"), "an empty thought"),
        ("dated", dialogue("q", "a"), f"with {DATE} as today's date"),
        ("stop of the next role", dialogue("q", "a"), "end in no special token"),
    ],
)  # fmt: skip
def test_what_is_said(folders: dict[str, Path], structure: str, row: Any, remark: str) -> None:
    row = {"messages": row} if isinstance(row, list) else row
    block = encoded(folders["byte"], [row], template=TEMPLATES[structure])
    remarks = block.remarks + block.not_written
    assert [count for said, count in remarks.items() if remark in said] == [2 if remark == "an empty" else 1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([{"role": "assistant", "content": "a", "weight": 0.5}], "message 0: expected weight of 0 or 1, got 0.5"),
        ([{"role": "assistant", "content": "a", "loss": "no"}], "message 0: expected loss of 0 or 1, got 'no'"),
        ([{"from": "alien", "value": "a"}], "as `from`, got 'alien'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "expected parts of content that are text, got {'type'"),
        ([{"role": "user", "content": 3}], "expected content that is text, got 3"),
        ([{"role": "assistant", "weight": 1}], "expected content, got role, weight"),
        ([{"content": "a"}], "message 0: expected a role, got content"),
        ("[1", "expected messages as a list, or a list as JSON text"),
        ([1], "expected messages that are objects, number 0 is 1"),
        ({"a": 1}, "expected messages as a list, got {'a': 1}"),
    ],
)
def test_messages_that_are_none(folders: dict[str, Path], row: Any, said: str) -> None:
    with pytest.raises(DataError) as caught:
        encoded(folders["byte"], [{"messages": row}], template=TEMPLATES["header by role"])
    assert caught.value.message.startswith("rows.jsonl, line 1: ") and said in caught.value.message
    assert caught.value.hint.startswith('a row is {"messages": [{"role": "user"') and "ShareGPT" in caught.value.hint


@pytest.mark.parametrize("around", AROUND)
def test_pairs_and_texts(tmp_path: Path, around: str) -> None:
    """Each is between what the post-processor writes, and ends in the end token once; an encoder reads its end, too."""
    folder = saved(tmp_path / "tokenizer", chat_tokenizer("metaspace", around))
    tokenizer = load_tokenizer(folder)
    start = [1] if around in ("start", "both") else []
    pair, text = {"input": "quick fox", "target": "lazy"}, {"t": "the dog"}
    block = encoded(folder, [pair], messages=None)
    target = [*tokenizer("lazy", add_special_tokens=False)["input_ids"], 2]
    given = tokenizer("quick fox", add_special_tokens=False)["input_ids"]
    assert samples(block) == [([*start, *given, *target], [0] * len(start + given) + [1] * len(target))]
    (row,) = block.samples
    assert np.frombuffer(block.tokens, np.uint16)[: row["input"]].tolist() == tokenizer("quick fox")["input_ids"]
    assert (row["input_end"], row["target_end"]) == (int(around in ("end", "both")), 1)
    tokens = [*start, *tokenizer("the dog", add_special_tokens=False)["input_ids"], 2]
    assert samples(encoded(folder, [text], messages=None, text="t")) == [(tokens, [0] + [1] * (len(tokens) - 1))]


def test_marks_are_those_of_transformers(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["metaspace"])
    row = dialogue("q", "Yes. No", "r", "the fox")
    ((tokens, learned),) = samples(encoded(folders["metaspace"], [row], template=TEMPLATES["marked"]))
    theirs = tokenizer.apply_chat_template(
        row["messages"], chat_template=TEMPLATES["marked"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert tokens == theirs["input_ids"][: len(tokens)] and learned == theirs["assistant_masks"][: len(learned)]
    assert not any(theirs["assistant_masks"][len(learned) :])


def test_bad_rows_may_be_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """Counted by reason, and the first three of each said with their places."""
    rows = [dialogue(f"q{at}", "a") for at in range(4)]
    rows += [{"messages": rows[0]["messages"][:1] * 2 + rows[0]["messages"][1:]}] * 4 + [{"other": 1}]
    rows += [{"messages": rows[0]["messages"][:1]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    spec = TaskSpec(name="n", source="rows.jsonl", messages="messages")
    mixture = Mixture(tasks=(spec,), chat_template=TEMPLATES["alternating"])
    run = PrepareSettings(source="test", tokenizer=folders["byte"], bad_rows=BadRows.SKIP)
    sources = open_sources(mixture, tmp_path)
    meta, notes = prepare_mixture(mixture, sources, tmp_path / "data", run)
    assert meta.skipped == {"refused_by_template": 4, "unreadable": 1, "no_assistant_turn": 1}
    assert meta.read == {"n": 10} and sum(meta.split_samples.values()) == 4
    said = [note for note in notes if "roles must take turns" in note]
    assert [note.partition(": ")[0] for note in said] == [f"  {tmp_path}/rows.jsonl, line {at}" for at in (5, 6, 7)]
    assert any("line 9: expected an object with messages" in note for note in notes)
    with pytest.raises(DataError, match="line 5: the chat template refuses the conversation: roles must take turns"):
        prepare_mixture(mixture, sources, tmp_path / "data", replace(run, bad_rows=BadRows.FAIL))


def test_show_prints_what_is_trained(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"task": "t", "input": "fox ?", "target": "dog"}) + "\n")
    words = ["--tokenizer", str(folders["metaspace"]), "--valid-fraction", "0", "--test-fraction", "0"]
    data = str(tmp_path / "data")
    assert cli(["data", "prepare", str(tmp_path / "rows.jsonl"), "--output", data, *words]) == 0
    capsys.readouterr()
    assert cli(["data", "show", data]) == 0
    assert "<s> fox ?⟦ dog</s>⟧" in capsys.readouterr().out
    tokenizer = load_tokenizer(folders["metaspace"])
    given, wanted = tokenizer("fox ?")["input_ids"], tokenizer("dog")["input_ids"][1:]
    assert cli(["data", "show", data, "--json"]) == 0
    sequence, counts = [*given[:-1], *wanted], [0] * (len(given) - 1) + [1] * len(wanted)
    assert json.loads(capsys.readouterr().out) == {"task": "t", "tokens": sequence, "learned": counts}
    assert cli(["data", "show", data, "--json", "--model", "t5"]) == 0
    assert json.loads(capsys.readouterr().out) == {"task": "t", "input": given, "target": wanted}


@pytest.mark.parametrize("family", ModelFamily)
def test_what_show_prints_is_what_is_collated(folders: dict[str, Path], tmp_path: Path, family: ModelFamily) -> None:
    """Lengths, samples and labels agree, and the end token is in the labels once."""
    run = PrepareSettings(source="test", tokenizer=folders["metaspace"], valid_fraction=0, test_fraction=0)
    rows = [{"input": f"fox {at}", "target": "dog " * (at + 1)} for at in range(4)]
    mixture = Mixture(tasks=(TaskSpec(name="n", source="x"),))
    meta = prepare_mixture(mixture, [rows_source(rows)], tmp_path / "data", run)[0]
    reader = open_split(tmp_path / "data", "train", family)
    is_t5 = family is ModelFamily.T5
    inputs, targets = reader.lengths.input.tolist(), reader.lengths.target.tolist()
    if not is_t5:
        inputs, targets = [sum(pair) for pair in zip(inputs, targets, strict=True)], [0] * 4
    shape = Shape(4, 64, 64 if is_t5 else 0)
    batch = lists.micro_batch(shape, inputs, targets, sample_ids=(0, 1, 2, 3))
    required = RequiredFields(tokens=True, decoder_tokens=is_t5, labels=True)
    collator = Collator(required=required, reader=reader, special=meta, loss_on=LossOn(meta.loss))
    host = collator(0, batch, family)
    for at, sample in enumerate(taught_samples(tmp_path / "data", "train", family)):
        counting = host.labels[at][host.loss_mask[at] == 1].tolist()
        assert counting == [token for token, counts in zip(sample.tokens, sample.learned, strict=True) if counts]
        assert counting.count(meta.eos_id) == 1 and counting[-1] == meta.eos_id
        if is_t5:
            assert host.tokens[at][: inputs[at]].tolist() == sample.given and sample.given[-1] == meta.eos_id
