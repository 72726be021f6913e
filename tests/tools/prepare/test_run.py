"""Text → dataset folder: content, determinism, splits, bad rows, and never half a folder."""

from collections import Counter
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, open_split, read_meta
from megatron_dynapipe.sampling import LongSamples, read_task_ids
from megatron_dynapipe.tools.prepare import PrepareSettings, TextSample, prepare_dataset, staging
from megatron_dynapipe.tools.prepare import tokenizer as tokenizers
from megatron_dynapipe.tools.prepare.text_encoder import TextEncoder

SENTENCE = "the quick brown fox jumps over lazy dogs while seven wizards mix potions of grey smoke"
WORDS = SENTENCE.split()


def text_samples(count: int = 40) -> list[TextSample]:
    """Rows of two tasks, of different lengths, all different."""
    return [
        TextSample(
            task="copy" if at % 3 else "count",
            input=" ".join(WORDS[: 2 + at % 12]) + f" {at}",
            target=" ".join(WORDS[at % 7 : at % 7 + 2]),
        )
        for at in range(count)
    ]


def prepare(output: Path, samples: list[TextSample] | None = None, **changes: object) -> DatasetMeta:
    chosen: dict[str, object] = {"source": "test", "vocabulary_size": 300}
    run = PrepareSettings(**(chosen | changes))  # type: ignore[arg-type]
    return prepare_dataset(text_samples() if samples is None else samples, output, run)[0]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_holds_the_text(tmp_path: Path) -> None:
    samples = text_samples()
    meta = prepare(tmp_path / "data", samples)
    assert meta == read_meta(tmp_path / "data")
    assert meta.tasks == ("copy", "count")
    assert (meta.vocabulary_size, meta.pad_id, meta.bos_id, meta.eos_id) == (300, 0, 1, 2)
    assert meta.split_samples == {"train": 36, "valid": 2, "test": 2}
    assert meta.read == dict(Counter(sample.task for sample in samples))
    assert (meta.skipped, meta.truncated, meta.rates) == ({}, {}, {})
    assert sum(meta.lengths["input"].values()) == 36
    tokenizer = tokenizers.load_tokenizer(tmp_path / "data" / "tokenizer")
    found = []
    for split in SPLITS:
        reader = open_split(tmp_path / "data", split, ModelFamily.T5)
        for at, task in enumerate(read_task_ids(tmp_path / "data", split, len(reader))):
            given_ids, wanted_ids = reader[at]
            assert open_split(tmp_path / "data", split, ModelFamily.GPT)[at][1].tolist() == [*wanted_ids, meta.eos_id]
            found.append((meta.tasks[task], tokenizer.decode(given_ids), tokenizer.decode(wanted_ids)))
    assert Counter(found) == Counter((sample.task, sample.input, sample.target) for sample in samples)


def test_given_tokenizer(tmp_path: Path) -> None:
    prepare(tmp_path / "one")
    prepare(tmp_path / "two", tokenizer=tmp_path / "one" / "tokenizer")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    # transformers notes there where a tokenizer was loaded from.
    for made in (one, two):
        del made["tokenizer/tokenizer_config.json"], made["manifest.json"]
    assert one == two
    assert read_meta(tmp_path / "one").content_hash == read_meta(tmp_path / "two").content_hash


def test_tokenizer_loads_in_megatron(tmp_path: Path) -> None:
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    meta = prepare(tmp_path / "data")
    theirs = HuggingFaceTokenizer(str(tmp_path / "data" / "tokenizer"))
    assert theirs.vocab_size == meta.vocabulary_size
    assert (theirs.pad_id, theirs.bos_id, theirs.eos_id) == (meta.pad_id, meta.bos_id, meta.eos_id)
    folder = tmp_path / "data" / "tokenizer"
    (ours,) = TextEncoder(tokenizers.load_tokenizer(folder))(["quick wizards"])
    assert theirs.text_to_ids("quick wizards") == ours


def test_special_tokens_in_text_are_text(tmp_path: Path) -> None:
    tokenizer = tokenizers.train_tokenizer([sample.input for sample in text_samples()], 300)
    tokenizer.save_pretrained(tmp_path)
    ids, empty = TextEncoder(tokenizers.load_tokenizer(tmp_path))(["a<s>b</s>", ""])
    assert not set(ids) & {0, 1, 2}
    assert tokenizer.decode(ids) == "a<s>b</s>"
    assert empty == []


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a tokenizer folder at .*nowhere, found none"):
        tokenizers.load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(DataError, match="expected a HuggingFace tokenizer, cannot load it"):
        tokenizers.load_tokenizer(tmp_path)
    bare = tokenizers.train_tokenizer([sample.input for sample in text_samples()], 300)
    bare.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="expected a tokenizer with eos_token, it has none"):
        tokenizers.load_tokenizer(tmp_path)


LONG = [
    TextSample("copy", " ".join(WORDS * 2), "fox"),
    TextSample("copy", "fox", " ".join(WORDS)),
    *(TextSample("copy", f"fox {at}", "dogs") for at in range(8)),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid_fraction": 0.5, "test_fraction": 0.5}, r"together below 1, got 0\.5 and 0\.5"),
        ({"valid_fraction": -0.1}, r"expected fractions of at least 0"),
        ({"max_input_length": 0}, "expected max_input_length of at least 1, got 0"),
    ],
)
def test_settings_are_checked(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareSettings(source="test", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "note", "kept"),
    [
        ("truncate", "2 of 10 samples were truncated to the maximum lengths", {"truncated": {"copy": 2}}),
        ("skip", "2 samples were left out: too long", {"skipped": {"too_long": 2}}),
    ],
)
def test_long_samples(tmp_path: Path, policy: str, note: str, kept: dict[str, dict[str, int]]) -> None:
    limits = {"max_input_length": 12, "max_target_length": 9, "long_samples": LongSamples(policy)}
    run = PrepareSettings(source="test", vocabulary_size=270, **limits)
    meta, notes = prepare_dataset(LONG, tmp_path / "data", run)
    assert notes == (note,)
    assert sum(meta.split_samples.values()) == (10 if policy == "truncate" else 8)
    assert {"skipped": meta.skipped, "truncated": meta.truncated} == {"skipped": {}, "truncated": {}} | kept
    assert (meta.max_input_length, meta.max_target_length) == (12, 9)
    longest = [open_split(tmp_path / "data", split, ModelFamily.T5).lengths for split in SPLITS]
    assert max(int(part.input.max(initial=0)) for part in longest) <= 12
    assert max(int(part.target.max(initial=0)) for part in longest) <= 9


NO_INPUT, NO_TARGET = TextSample("copy", "", "fox"), TextSample("copy", "fox", "")
TOO_LONG = {"vocabulary_size": 270, "max_input_length": 12}
ALL_TOO_LONG = {"vocabulary_size": 270, "max_input_length": 1, "max_target_length": 1}


@pytest.mark.parametrize(
    ("samples", "changes", "message"),
    [
        (text_samples(), {"vocabulary_size": 5000}, r"text enough for a vocabulary of 5000, got \d+ entries out of it"),
        (LONG, TOO_LONG, r"sample, row 0 \(task 'copy'\): expected .* of at most 12 input tokens, this one has"),
        (LONG, ALL_TOO_LONG | {"long_samples": LongSamples.SKIP}, "for training, got 0: all others are too long"),
        ([], {}, "expected at least 1 sample, got 0"),
        ([TextSample(f"task {at}", SENTENCE, f"{at} dogs") for at in range(21)], {}, "at most 20 tasks, got 21"),
        ([*text_samples(), NO_INPUT], {}, r"row 40 \(task 'copy'\): expected every input to have at least 1 token"),
        ([*text_samples(), NO_TARGET], {}, r"row 40 \(task 'copy'\): expected every target to have at least 1 token"),
    ],
    ids=["vocabulary", "too long", "all too long", "none", "tasks", "no input", "no target"],
)
def test_what_makes_no_dataset_leaves_what_was_there(tmp_path, monkeypatch, samples, changes, message) -> None:
    monkeypatch.setattr(staging, "MOST_TASKS", 20)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "data", samples, **changes)
    assert files(tmp_path) == {} and list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_empty_samples_may_be_left_out(tmp_path: Path) -> None:
    run = PrepareSettings(source="test", vocabulary_size=300, skip_empty=True)
    meta = prepare_dataset([*text_samples(), NO_INPUT], tmp_path / "data", run)[0]
    assert meta.skipped == {"empty": 1} and sum(meta.split_samples.values()) == 40
