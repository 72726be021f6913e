"""A recipe's samples as a dataset folder: the tokens and what is learned of them come out as they went in."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.learned import is_written, spans, target_start
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.data.spans import LossOn, sequence
from megatron_dynapipe.megatron.bridge import samples
from megatron_dynapipe.sampling import Cutter, SpanTable

TOKENIZER = SimpleNamespace(vocab_size=100, eos_id=2, pad_id=0)


class Rows:
    """A dataset as Bridge's are: samples by number, and their collation into padded rows."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, padding: int = 3) -> None:
        self._rows = rows
        self._padding = padding

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, batch: Sequence[int]) -> dict[str, Any]:
        """Tokens, labels and mask of one sample."""
        tokens, learned = self._rows[batch[0]]
        padding = [0] * self._padding
        return {
            "tokens": np.array([[*tokens[:-1], *padding]]),
            "labels": np.array([[*tokens[1:], *padding]]),
            "loss_mask": np.array([[*learned[1:], *padding]]),
        }


def test_a_sample_ends_with_what_is_learned_last() -> None:
    rows = Rows([([5, 6, 7, 8, 9, 10], [0, 0, 1, 0, 1, 0])])
    sample = samples.sample_of(rows, 0)
    assert sample is not None
    tokens, learned = sample
    assert tokens.tolist() == [5, 6, 7, 8, 9]
    assert target_start(learned) == 4
    assert list(spans(learned)) == [(2, 3)]


def test_a_sample_of_which_nothing_is_learned_is_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows([([5, 6, 7], [0, 0, 1]), ([5, 6], [0, 0])])
    samples.write(tmp_path / "made", (rows, None, None), TOKENIZER)
    assert "train: 1 of 2 samples are left out" in capsys.readouterr().out
    assert read_meta(tmp_path / "made").split_samples == {"train": 1, "valid": 0, "test": 0}
    assert is_written(tmp_path / "made")


def test_samples_are_read_again_where_others_are_asked_for() -> None:
    """Datasets of a recipe may depend on its number of iterations."""
    described = SimpleNamespace(dataset_root="data", seq_length=64)
    names = {
        samples.digest(dataset, tokenizer, counts)
        for dataset in (described, SimpleNamespace(dataset_root="others", seq_length=64))
        for tokenizer in (TOKENIZER, SimpleNamespace(vocab_size=200))
        for counts in ([160, 32, 16], [320, 64, 16])
    }
    assert len(names) == 8
    assert samples.digest(described, TOKENIZER, [160, 32, 16]) in names


def test_samples_of_which_none_is_learned_are_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training samples of a recipe of Megatron-Bridge have none"):
        samples.write(tmp_path / "made", (Rows([([5, 6], [0, 0])]), None, None), TOKENIZER)
    assert not is_written(tmp_path / "made")


def test_labels_that_are_other_tokens_are_refused() -> None:
    class Shifted(Rows):
        def collate_fn(self, batch: Sequence[int]) -> dict[str, Any]:
            made = super().collate_fn(batch)
            return made | {"labels": made["labels"] + 1}

    with pytest.raises(DataError, match="labels that are the tokens one further"):
        samples.sample_of(Shifted([([5, 6, 7, 8], [0, 1, 1, 1])]), 0)


@st.composite
def masked(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens, and which of them are learned: never the first, some of the others."""
    tokens = draw(st.lists(st.integers(3, 99), min_size=2, max_size=20))
    learned = [0, *draw(st.lists(st.integers(0, 1), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
    learned[draw(st.integers(1, len(tokens) - 1))] = 1
    return tokens, learned


@given(rows=st.lists(masked(), min_size=1, max_size=6))
def test_what_is_trained_is_what_was_read(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    folder = tmp_path_factory.mktemp("samples") / "made"
    samples.write(folder, (Rows(rows), None, None), TOKENIZER)
    reader = open_split(folder, "train", ModelFamily.GPT)
    cutter = Cutter(ModelFamily.GPT, spans=SpanTable.read(folder / "train"))
    for number, (tokens, learned) in enumerate(rows):
        end = max(place for place, counts in enumerate(learned) if counts) + 1
        stored = tuple(part.astype(np.int64) for part in reader[number])
        trained, counts = sequence(cutter, number, (stored[0], stored[1]), end, LossOn.TARGETS)
        assert trained.tolist() == tokens[:end]
        assert counts[1:].tolist() == learned[1:end]
