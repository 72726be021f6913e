"""What conversations, pairs and texts teach, held against transformers and against a slow reading by characters."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import PrepareSettings
from megatron_dynapipe.tools.prepare.chat import DATE
from megatron_dynapipe.tools.prepare.encode import EncodedBlock, Encoder
from megatron_dynapipe.tools.prepare.tokenizer import load_tokenizer
from tests.helpers.chat_models import PRE, TEMPLATES, chat_tokenizer, saved

type Sample = tuple[list[int], list[int]]
"""Tokens of a decoder-only sample, and 1 for each that counts."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: saved(root / kind, chat_tokenizer(kind, "both")) for kind in PRE}


def encoded(folder: Path, rows: list[Any], *, template: str | None = None, **task: Any) -> EncodedBlock:
    spec = TaskSpec(**{"name": "n", "source": "x", "messages": "messages"} | task)
    encode = Encoder(
        folder,
        Mixture(tasks=(spec,), chat_template=template),
        PrepareSettings(source="test"),
        2**15,
        tuple(range(3, 20)),
    )
    lines = b"\n".join(json.dumps(row).encode() for row in rows)
    return encode(Block(file="rows.jsonl", unit="line", first=1, lines=lines, done=0), 0)


def samples(block: EncodedBlock) -> list[Sample]:
    """A block's samples as a decoder-only model has them."""
    columns, at, found = block.columns, 0, []
    for number, ((given, wanted), (after, _)) in enumerate(
        zip(columns["lengths"].tolist(), columns["ends"].tolist(), strict=True)
    ):
        tokens = columns["tokens"][at : at + given + wanted].tolist()
        at += given + wanted
        learned = [0] * given + [1] * wanted
        for sample, first, end in columns["spans"].tolist():
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
@hypothesis.settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
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
