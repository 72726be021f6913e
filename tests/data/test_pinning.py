"""A micro-batch in one buffer is the same micro-batch; the thread that reads ahead makes it."""

from contextlib import closing
from dataclasses import fields, replace

import pytest
import torch

from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.iterator import PlannedIterator, in_one_buffer, pinning
from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.megatron.execution.step_functions import copy_buffer, gpt_batch
from tests.data.dataset import collator_of, micro_batch, write_dataset
from tests.helpers.lists import packed
from tests.helpers.plans import stage_entry

ALL = RequiredFields(tokens=True, decoder_tokens=True, labels=True)


def tensors(batch) -> dict[str, torch.Tensor | None]:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    for name in ("input_segments", "decoder_segments"):
        if (row := values.pop(name)) is not None:
            values |= {f"{name}.{part}": getattr(row, part) for part in ("offsets", "positions", "key_offsets")}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


PADDED, PACKED = micro_batch([0, 1], Shape(2, 8, 8)), micro_batch([0, 1], Shape(1, 8, 8), layout=BatchLayout.PACKED)
CUT = RowSegments.of([0, 4, 6], 8, {0: CutSegment(5, 4, False)})
"""A row whose first sample is a piece that begins at position 4."""


@pytest.mark.parametrize(
    ("required", "plan"),
    [(ALL, PADDED), (ALL, PACKED), (RequiredFields(samples=True), PADDED), (RequiredFields(), PADDED)],
)
def test_one_buffer_holds_the_same(required, plan, tmp_path):
    batch = collator_of(write_dataset(tmp_path), required)(0, plan, ModelFamily.T5)
    assert pinning(torch.device("cpu"))(batch) is batch, "a CPU needs none"
    copy = in_one_buffer(batch, pin=False)
    if plan is PACKED:
        assert copy.input_segments.lengths == batch.input_segments.lengths
    before, after = tensors(batch), tensors(copy)
    assert before.keys() == after.keys() and before
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
        assert after[name].data_ptr() % 16 == after[name].untyped_storage().data_ptr() % 16, name
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values()}) == 1
    assert (copy.index, copy.family, copy.shape) == (batch.index, batch.family, batch.shape)


def test_numbers_for_routers_come_to_a_device_in_the_same_copy():
    """One of their own would pin memory inside a list."""
    required, plan = RequiredFields(samples=True), packed(ModelFamily.GPT, (5, 3), (0, 0))
    host = Collator(required=required, reader=None, special=None)(0, plan, ModelFamily.GPT)
    assert host.samples.flatten().tolist()[:7] == [0, 0, 0, 0, 1, 1, 2]
    made = gpt_batch(in_one_buffer(host, pin=False), torch.device("meta"), explicit_mask=False)
    told = made["told"]
    assert told.samples.is_meta and told.samples.shape == host.samples.shape and told.sample_count == 2


def test_a_cut_row_is_copied_to_a_device_as_one_buffer(tmp_path):
    """Its keys' offsets too: else the training thread would pin and copy all of it again."""
    whole = collator_of(write_dataset(tmp_path), ALL)(0, PACKED, ModelFamily.T5)
    batch = replace(whole, input_segments=CUT, decoder_segments=None)
    copy = in_one_buffer(batch, pin=False)
    row = copy.input_segments
    assert torch.equal(row.key_offsets, CUT.key_offsets) and not torch.equal(row.key_offsets, row.offsets)
    parts = [copy.tokens, copy.labels, row.offsets, row.positions, row.key_offsets]
    copies = copy_buffer(torch.device("cpu"), parts)
    assert copies is not None and all(torch.equal(*pair) for pair in zip(parts, copies, strict=True))


def test_the_iterator_prepares_what_it_yields(tmp_path):
    collate = collator_of(write_dataset(tmp_path), ALL)

    def entry(iteration):
        return stage_entry(iteration, micro_batch([0], Shape(1, 8, 8)))

    iterator = PlannedIterator(entry, collate, stop_iteration=1, prepare=lambda b: in_one_buffer(b, pin=False))
    with closing(iterator):
        (item,) = iterator
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors(item.micro_batches[0]).values()}) == 1
