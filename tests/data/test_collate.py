"""Host tensors of planned micro-batches, as tables checked by eye."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from megatron_dynapipe.core.errors import DataError, PlanError
from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.data.collate import Collator, HostMicroBatch, RequiredFields
from megatron_dynapipe.data.iterator import in_one_buffer
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.sampling import Cutter, SpanTable, TruncationSide
from tests.data.dataset import BOS as B
from tests.data.dataset import EOS as E
from tests.data.dataset import collator_of, micro_batch, write_dataset

ALL = RequiredFields(tokens=True, decoder_tokens=True, labels=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path)


def collate(folder: Path, family: str, plan: MicroBatch, required: RequiredFields = ALL) -> HostMicroBatch:
    return collator_of(folder, required)(3, plan, ModelFamily(family))


def rows(tensor: torch.Tensor | None) -> list[list[float]]:
    assert tensor is not None
    return tensor.tolist()  # type: ignore[no-any-return]


def test_encoder_decoder(folder: Path) -> None:
    batch = collate(folder, "t5", micro_batch([2, 1], Shape(2, 5, 6)))
    assert batch.index == 3
    assert batch.shape == (2, 5, 6)
    assert rows(batch.tokens) == [[15, 16, 17, 18, 0], [14, 0, 0, 0, 0]]
    assert rows(batch.decoder_tokens) == [[B, 24, 25, 26, 0, 0], [B, 23, 0, 0, 0, 0]]
    assert rows(batch.labels) == [[24, 25, 26, E, 0, 0], [23, E, 0, 0, 0, 0]]
    assert rows(batch.loss_mask) == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert rows(batch.input_lengths) == [4, 1]
    assert rows(batch.decoder_lengths) == [4, 2]
    assert batch.tokens is not None and batch.tokens.dtype == torch.int64
    assert batch.loss_mask is not None and batch.loss_mask.dtype == torch.float32
    assert batch.input_lengths.dtype == torch.int32
    assert batch.input_segments is None and batch.decoder_segments is None


def test_encoder_decoder_truncated(folder: Path) -> None:
    """The plan's lengths cut the samples; the end token is kept."""
    batch = collate(folder, "t5", micro_batch([2, 0], Shape(2, 3, 4), inputs=[3, 2], targets=[2, 1]))
    assert rows(batch.tokens) == [[15, 16, 17], [11, 12, 0]]
    assert rows(batch.decoder_tokens) == [[B, 24, 25, 0], [B, 21, 0, 0]]
    assert rows(batch.labels) == [[24, 25, E, 0], [21, E, 0, 0]]


def test_decoder_only(folder: Path) -> None:
    """Sample 0 whole, samples 2 and 3 cut before their targets, sample 1 to a single token."""
    plan = micro_batch([0, 2, 3, 1], Shape(4, 6), inputs=[5, 6, 2, 1], targets=[0, 0, 0, 0])
    batch = collate(folder, "gpt", plan)
    assert rows(batch.tokens) == [
        [11, 12, 13, 21, 0, 0],
        [15, 16, 17, 24, 25, 0],
        [19, 0, 0, 0, 0, 0],
        [14, 0, 0, 0, 0, 0],
    ]
    assert rows(batch.labels) == [[12, 13, 21, 22, 0, 0], [16, 17, 24, 25, 26, 0], [27, 0, 0, 0, 0, 0], [0] * 6]
    assert rows(batch.loss_mask) == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert rows(batch.input_lengths) == [4, 5, 1, 1]
    assert batch.decoder_lengths is None
    assert batch.decoder_tokens is None


def test_packed_rows(folder: Path) -> None:
    """A target has a spare position in the row, as planned; what is left at the end belongs to no sample."""
    batch = collate(folder, "t5", micro_batch([2, 1], Shape(1, 8, 8), layout=BatchLayout.PACKED))
    assert rows(batch.tokens) == [[15, 16, 17, 18, 14, 0, 0, 0]]
    assert rows(batch.decoder_tokens) == [[B, 24, 25, 26, 0, B, 23, 0]]
    assert rows(batch.labels) == [[24, 25, 26, E, 0, 23, E, 0]]
    assert rows(batch.loss_mask) == [[1, 1, 1, 1, 0, 1, 1, 0]]
    assert (batch.input_segments.lengths, batch.decoder_segments.lengths) == ((4, 1, 3), (5, 3, 0))
    assert rows(batch.input_lengths) == [4, 1]
    # Sample 0 whole, sample 3 cut before its target, sample 1 to a single token; the row rounded up to more.
    for length in (8, 24):
        plan = micro_batch([0, 3, 1], Shape(1, length), inputs=[5, 2, 1], targets=[0] * 3, layout=BatchLayout.PACKED)
        batch, rest = collate(folder, "gpt", plan), [0] * (length - 8)
        assert rows(batch.tokens) == [[11, 12, 13, 21, 19, 14, 0, 0, *rest]]
        assert rows(batch.labels) == [[12, 13, 21, 22, 27, 0, 0, 0, *rest]]
        assert rows(batch.loss_mask) == [[1, 1, 1, 1, 1, 0, 0, 0, *rest]]
        assert batch.input_segments.lengths == (4, 1, 1, length - 6) and batch.decoder_segments is None


@pytest.mark.parametrize(
    ("family", "shape", "expected"),
    [("gpt", Shape(1, 12), "1x8"), ("t5", Shape(1, 4, 8), "1x8+8"), ("t5", Shape(1, 8, 0), "1x8+8")],
)
def test_a_row_that_is_not_of_its_samples_is_refused(folder: Path, family: str, shape: Shape, expected: str) -> None:
    targets = None if family == "t5" else [0, 0]
    plan = micro_batch([2, 1], shape, targets=targets, layout=BatchLayout.PACKED)
    said = f"micro-batch 3: expected a packed row of shape {expected} or longer for its 2 samples, got {shape}"
    with pytest.raises(PlanError, match=re.escape(said)):
        collate(folder, family, plan, RequiredFields())


@pytest.mark.parametrize(
    ("required", "present"),
    [
        (RequiredFields(tokens=True), {"tokens"}),
        (RequiredFields(decoder_tokens=True), {"decoder_tokens"}),
        (RequiredFields(labels=True), {"labels", "loss_mask"}),
        (RequiredFields(decoder_tokens=True, labels=True), {"decoder_tokens", "labels", "loss_mask"}),
        (RequiredFields(), set()),
    ],
)
def test_only_what_the_stage_needs(folder: Path, required: RequiredFields, present: set[str]) -> None:
    whole = collate(folder, "t5", micro_batch([0], Shape(1, 8, 8)))
    if not present:  # a stage in the middle reads no text
        for path in folder.glob("train.*"):
            path.unlink()
    batch = collate(folder, "t5", micro_batch([0], Shape(1, 8, 8)), required)
    assert rows(batch.input_lengths) == [3]
    for name in ("tokens", "decoder_tokens", "labels", "loss_mask"):
        got = getattr(batch, name)
        assert (got is not None) == (name in present)
        assert got is None or torch.equal(got, getattr(whole, name))


def test_what_a_collator_does_not_do() -> None:
    collator = Collator(required=RequiredFields(), reader=None, special=None, batch_layouts=(BatchLayout.PADDED,))
    plan = micro_batch([2, 1], Shape(1, 8, 8), layout=BatchLayout.PACKED)
    with pytest.raises(PlanError, match=r"expected a layout that the settings allow \(padded\), got packed"):
        collator(0, plan, ModelFamily.T5)
    with pytest.raises(DataError, match=r"expected a dataset to read for RequiredFields\(tokens=True"):
        Collator(required=RequiredFields(tokens=True), reader=None, special=None)


SMALL, OTHER = "expected 1…{} {} positions, sample 0 needs {}", "expected {} of sample 1 as planned, the dataset has {}"


@pytest.mark.parametrize(
    ("family", "plan", "message"),
    [
        ("t5", micro_batch([1, 0], Shape(2, 2, 8)), f"batch 3 of shape 2x2+8: {SMALL.format(2, 'input', 3)}"),
        ("t5", micro_batch([0], Shape(1, 8, 2)), f"shape 1x8+2: {SMALL.format(2, 'decoder', 3)}"),
        ("gpt", micro_batch([0], Shape(1, 3), inputs=[5]), f"shape 1x3: {SMALL.format(3, 'input', 4)}"),
        ("t5", micro_batch([1], Shape(1, 8, 8), inputs=[2]), OTHER.format("2 input tokens", 1)),
        ("t5", micro_batch([1], Shape(1, 8, 8), targets=[2]), OTHER.format("2 target tokens", 1)),
        ("gpt", micro_batch([1], Shape(1, 8), inputs=[3]), OTHER.format("3 tokens", 2)),
    ],
)
def test_plans_that_the_shape_or_the_dataset_does_not_fit(folder, family, plan, message):
    with pytest.raises((PlanError, DataError)) as caught:
        collate(folder, family, plan)
    assert message in str(caught.value)
    assert ("the plan was made from another dataset" in str(caught.value)) == ("as planned" in message)


CHAT = [([1, 2, 3, 4, 5, 6], [7, 8, 9])]
"""Tokens 3 and 4 of the input are an earlier turn of the assistant."""
TURNS = SpanTable(np.array([[0, 2, 4]]))


@pytest.mark.parametrize(
    ("loss_on", "side", "planned", "tokens", "counts"),
    [
        ("everything", "right", 9, [1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 1, 1, 1, 1, 1]),
        ("targets", "right", 9, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 1, 0, 0, 1, 1, 1]),
        ("targets", "right", 5, [1, 2, 7, 8], [0, 1, 1, 1]),
        ("targets", "left", 5, [5, 6, 7, 8], [0, 1, 1, 1]),  # from the end of the earlier answer on
        ("targets", "left", 4, [6, 7, 8], [1, 1, 1]),
        ("targets", "middle", 5, [1, 6, 7, 8], [0, 1, 1, 1]),
        ("everything", "middle", 4, [1, 7, 8], [1, 1, 1]),
        ("targets", "left", 3, [6, 7], [1, 1]),  # the target's end, where nothing else is left
    ],
)
def test_what_counts_of_a_sequence(loss_on: str, side: str, planned: int, tokens: list[int], counts: list[int]) -> None:
    """Counts belong to labels: each token's is that of the next one."""
    reader = [(np.array(tokens_in), np.array(tokens_out)) for tokens_in, tokens_out in CHAT]
    collator = Collator(
        required=ALL,
        reader=reader,
        special=SimpleNamespace(pad_id=0, bos_id=1, eos_id=2),
        loss_on=LossOn(loss_on),
        cutter=Cutter(ModelFamily.GPT, (TruncationSide(side),), TURNS),
    )
    plan = micro_batch([0], Shape(1, 8), inputs=[planned], targets=[0])
    batch = collator(0, plan, ModelFamily.GPT)
    assert rows(batch.tokens)[0][: planned - 1] == tokens
    assert rows(batch.loss_mask) == [[*counts, *[0] * (9 - planned)]]
    assert rows(batch.labels)[0][: planned - 2] == tokens[1:]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        # Position · samples + sample of each label: an earlier turn's, then the target's; some that do not count.
        (([0], Shape(1, 16), [9]), ([1, 2, 5, 6, 7, 0, 0, 0], [3, 4, 7, 8, 9, 2, 2, 2], 5)),
        (([0, 1], Shape(2, 8), [9, 4]), ([2, 4, 5, 10, 12, 14, 0, 0], [3, 4, 8, 7, 8, 9, 2, 2], 6)),
        (([2], Shape(1, 16), [6]), ([0] * 8, [7] * 8, 0)),
        (([0], Shape(1, 8), [9]), None),  # as many rows as positions
    ],
)
def test_rows_of_what_counts(plan: tuple[list[int], Shape, list[int]], expected: tuple[list[int], ...] | None) -> None:
    ids, shape, planned = plan
    reader = [*CHAT, ([5, 6, 7], [8]), ([6, 7, 8, 9, 1, 2], [])]
    collator = Collator(
        required=RequiredFields(labels=True),
        reader=[(np.array(given, np.int64), np.array(wanted, np.int64)) for given, wanted in reader],
        special=SimpleNamespace(pad_id=0, bos_id=1, eos_id=2),
        loss_on=LossOn.TARGETS,
        cutter=Cutter(ModelFamily.GPT, spans=TURNS),
        task_ids=np.array([4, 5, 6], np.int16),
    )
    plan = micro_batch(ids, shape, inputs=planned, targets=[0] * len(ids))
    assert collator(0, plan, ModelFamily.GPT).rows is None, "as the plan says"
    batch = collator(0, msgspec.structs.replace(plan, labels=(1,) * len(ids)), ModelFamily.GPT)
    if expected is None:
        assert batch.rows is None and rows(batch.loss_mask) == [[0, 1, 1, 0, 0, 1, 1, 1]]
        return
    places, labels, counting = expected
    assert rows(batch.rows) == places
    assert rows(batch.labels) == [labels]
    assert rows(batch.loss_mask) == [[1] * counting + [0] * (8 - counting)]
    assert rows(batch.tasks)[0][:counting] == [4 + ids[place % len(ids)] for place in places[:counting]]
    assert in_one_buffer(batch, pin=False).rows is not None


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_tasks_of_positions(folder: Path, family: str) -> None:
    required = RequiredFields(labels=True)
    collator = dataclasses.replace(collator_of(folder, required), task_ids=np.array([4, 5, 6, 7], np.int16))
    if family == "gpt":
        batch = collator(0, micro_batch([0, 1], Shape(2, 6), inputs=[5, 2], targets=[0, 0]), ModelFamily.GPT)
        assert rows(batch.tasks) == [[4, 4, 4, 4, 0, 0], [5, 0, 0, 0, 0, 0]]
    else:
        batch = collator(0, micro_batch([2, 1], Shape(2, 5, 5)), ModelFamily.T5)
        assert rows(batch.tasks) == [[6, 6, 6, 6, 0], [5, 5, 0, 0, 0]]
    assert in_one_buffer(batch, pin=False).tasks is not None
    assert collator_of(folder, required)(0, micro_batch([0], Shape(1, 8, 8)), ModelFamily.T5).tasks is None


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((2, 2), np.int64),
        np.array([[1, 0, 2], [0, 0, 2]]),
        np.array([[0, 3, 3]]),
        np.array([[0, 2, 4], [0, 3, 5]]),
        np.zeros((1, 3)),
    ],
)
def test_damaged_spans(tmp_path: Path, table: np.ndarray) -> None:
    assert SpanTable.read(tmp_path / "train").of(3) == [], "there need be none"
    np.save(tmp_path / "train.spans.npy", table)
    with pytest.raises(DataError, match=r"train\.spans\.npy: expected"):
        SpanTable.read(tmp_path / "train")
