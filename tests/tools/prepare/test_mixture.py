"""Mixtures of several entries: every sample is in a split or counted as left out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, read_meta
from megatron_dynapipe.sampling import LengthTable, LongSamples, TruncationSide
from megatron_dynapipe.tools.inspect import problems
from megatron_dynapipe.tools.mixture.sources import rows_source
from megatron_dynapipe.tools.mixture.spec import Mixing, Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import PrepareSettings, prepare_mixture
from megatron_dynapipe.tools.prepare import tokenizer as tokenizers
from tests.helpers.examples import examples


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers.train_tokenizer([], 259).save_pretrained(folder)
    return folder


def prepare(
    output: Path, tokenizer: Path, entries: list[tuple[TaskSpec, list[Any]]], **changes: Any
) -> tuple[DatasetMeta, tuple[str, ...]]:
    mixing = changes.pop("mixing", Mixing())
    template = changes.pop("chat_template", None)
    mixture = Mixture(tasks=tuple(spec for spec, _ in entries), mixing=mixing, chat_template=template)
    run = PrepareSettings(source="test", tokenizer=tokenizer, **changes)
    return prepare_mixture(mixture, [rows_source(rows) for _, rows in entries], output, run)


def pairs(count: int, size: int = 3) -> list[dict[str, str]]:
    return [{"input": f"{at % (count // 2 + 1)}" * size, "target": "y"} for at in range(count)]


def test_each_entry_is_split_by_itself(tmp_path: Path, tokenizer: Path) -> None:
    entries = [
        (TaskSpec(name="small", source="x"), pairs(4)),
        (TaskSpec(name="large", source="x", valid=0.5, test=0.0), pairs(100)),
    ]
    meta = prepare(tmp_path / "data", tokenizer, entries)[0]
    assert meta.samples == {
        "train": {"large": 50, "small": 2},
        "valid": {"large": 50, "small": 1},
        "test": {"small": 1},
    }
    assert meta.rates == {}
    assert not list(problems(tmp_path / "data"))


def test_where_inputs_are_cut_is_a_tasks_own(tmp_path: Path, tokenizer: Path) -> None:
    """In the manifest, of the tasks that do not lose their inputs' ends; conversations lose their beginnings."""
    entries = [
        (TaskSpec(name="a", source="x"), pairs(4)),
        (TaskSpec(name="b", source="x", truncate=TruncationSide.MIDDLE), pairs(4)),
    ]
    meta = prepare(tmp_path / "data", tokenizer, entries)[0]
    assert meta.sides == {"b": "middle"} and meta.task_sides == (TruncationSide.RIGHT, TruncationSide.MIDDLE)
    assert read_meta(tmp_path / "data") == meta
    alone = prepare(tmp_path / "alone", tokenizer, entries[1:])[0]
    assert alone.task_sides == (TruncationSide.MIDDLE,)
    chats = TaskSpec(name="c", source="x", messages="messages")
    assert chats.side is TruncationSide.LEFT
    assert msgspec.structs.replace(chats, truncate=TruncationSide.RIGHT).side is TruncationSide.RIGHT


def test_duplicates_and_limits(tmp_path: Path, tokenizer: Path) -> None:
    entries = [
        (TaskSpec(name="a", source="x", deduplicate=True), pairs(40)),
        (TaskSpec(name="b", source="x", limit=10, weight=3), pairs(40)),
        (TaskSpec(name="c", source="x", limit=50), pairs(40)),
    ]
    meta, notes = prepare(tmp_path / "data", tokenizer, entries, mixing=Mixing(cap=20))
    assert meta.skipped == {"duplicate": 19, "over_limit": 30}
    assert Counter({task: sum(meta.samples[split].get(task, 0) for split in SPLITS) for task in "abc"}) == Counter(
        a=21, b=10, c=40
    )
    assert "task c: 50 samples were asked for, it has 40" in notes
    assert meta.rates["b"] / meta.rates["c"] == pytest.approx(3 * meta.samples["train"]["b"] / 20)


def test_one_task_in_two_entries(tmp_path: Path, tokenizer: Path) -> None:
    entries = [
        (TaskSpec(name="a", source="x"), pairs(4)),
        (TaskSpec(task_column="t", source="x"), [row | {"t": "a"} for row in pairs(4)]),
    ]
    with pytest.raises(DataError, match="expected every task in one entry of the mixture, a is in two"):
        prepare(tmp_path / "data", tokenizer, entries)


def test_pad_token(tmp_path: Path, tokenizer: Path) -> None:
    """A tokenizer without one pads with its end token, or with the one that is named; so it does for conversations."""
    bare = tmp_path / "bare"
    tokenizers.load_tokenizer(tokenizer).save_pretrained(bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    entries = [(TaskSpec(name="a", source="x"), pairs(4))]
    meta, notes = prepare(tmp_path / "data", bare, entries)
    assert (meta.pad_id, meta.eos_id) == (2, 2)
    assert any("its end token '</s>' fills padded rows" in note and "--pad-token" in note for note in notes)
    with pytest.raises(DataError, match="expected a pad token of its vocabulary, got 'nothing'"):
        prepare(tmp_path / "data", bare, entries, pad_token="nothing")
    chats = [
        {"messages": [{"role": "user", "content": f"{at}"}, {"role": "assistant", "content": "b"}]} for at in range(4)
    ]
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    entries.append((TaskSpec(name="b", source="x", messages="messages"), chats))
    for pad_token, pad in (("<s>", 1), (None, 2)):
        meta, notes = prepare(tmp_path / "data", bare, entries, pad_token=pad_token, chat_template=template)
        assert meta.pad_id == pad and meta.samples["train"]["b"] == 2
        assert any("pad token" in note for note in notes) == (pad_token is None)


rows_of_entry = st.lists(
    st.fixed_dictionaries({"input": st.text("ab", max_size=8), "target": st.text("cd", max_size=4)}), max_size=30
)
entry = st.tuples(
    st.fixed_dictionaries(
        {"deduplicate": st.booleans(), "limit": st.none() | st.integers(1, 20), "valid": st.none() | st.floats(0, 0.5)}
    ),
    rows_of_entry,
)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.lists(entry, min_size=1, max_size=4), policy=st.sampled_from([LongSamples.SKIP, LongSamples.TRUNCATE])
)
def test_samples_in_are_samples_out(tmp_path_factory, tokenizer, entries, policy):
    given_entries = [(TaskSpec(name=f"task {at}", source="x", **spec), rows) for at, (spec, rows) in enumerate(entries)]
    folder = tmp_path_factory.mktemp("mixture") / "data"
    limits = {"max_input_length": 5, "long_samples": policy, "skip_empty": True}
    kept = [row for _, rows in entries for row in rows if row["input"] and row["target"]]
    if not kept or (policy is LongSamples.SKIP and all(len(row["input"]) > 5 for row in kept)):
        with pytest.raises(DataError, match="expected at least 1 sample for training"):
            prepare(folder, tokenizer, given_entries, **limits)
        return
    try:
        meta = prepare(folder, tokenizer, given_entries, **limits)[0]
    except DataError as error:  # all samples that are left belong to validation and testing
        if "expected at least 1 sample for training" not in error.message:
            raise
        return
    assert meta == read_meta(folder)
    read = sum(len(rows) for _, rows in entries)
    assert sum(meta.read.values()) == read == sum(meta.split_samples.values()) + sum(meta.skipped.values())
    for split in SPLITS:
        lengths = LengthTable.read(folder, split)
        assert len(lengths) == meta.split_samples[split]
        assert max(lengths.input, default=0) <= 5
    assert not list(problems(folder))
