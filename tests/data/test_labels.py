"""The positions that plans count on are those that run, whatever the side, the kind of sample and the limit."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily, Shape, round_up
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.sampling import (
    Cutter,
    LengthTable,
    LongSamples,
    Sampler,
    SamplerSettings,
    SpanTable,
    TruncationSide,
)
from tests.helpers import lists
from tests.helpers.conversations import samples, span_table

REQUIRED = RequiredFields(tokens=True, decoder_tokens=True, labels=True)
SPECIAL = SimpleNamespace(pad_id=0, bos_id=1, eos_id=2)


@given(
    st.lists(samples(), min_size=1, max_size=6),
    st.sampled_from(ModelFamily),
    st.sampled_from([*[(side,) for side in TruncationSide], tuple(TruncationSide)]),
    st.integers(2, 60),
    st.integers(1, 40),
)
def test_planned_positions_and_labels_run(rows, family, sides, most_input, most_target):
    is_gpt = family is ModelFamily.GPT
    settings = SamplerSettings(
        family=family,
        seed=1,
        samples_per_iteration=len(rows),
        max_input_length=most_input,
        max_target_length=0 if is_gpt else most_target,
        long_samples=LongSamples.TRUNCATE,
        sides=sides,
        labels=is_gpt,
    )
    table = LengthTable(input=np.array([row[0] for row in rows], np.int32), target=np.array([r[1] for r in rows], "i4"))
    tasks = np.arange(len(rows), dtype=np.int16) % 3
    batch = Sampler(table, settings, tasks, span_table(rows)).batch(0)
    reader = [(10 + np.arange(row[0]), 100 + np.arange(row[1])) for row in rows]
    collator = Collator(
        required=REQUIRED,
        reader=reader,
        special=SPECIAL,
        loss_on=LossOn.TARGETS,
        cutter=Cutter(family, sides, span_table(rows), tasks),
    )
    for at, sample in enumerate(batch.sample_ids.tolist()):
        lengths = int(batch.input_lengths[at]), int(batch.target_lengths[at])
        shape = Shape(1, round_up(lengths[0]), 0 if is_gpt else round_up(lengths[1] + 2))
        plan = lists.micro_batch(shape, [lengths[0]], [lengths[1]], sample_ids=(sample,))
        host = collator(0, plan, family)
        assert int(host.input_lengths) == (lengths[0] - 1 if is_gpt else lengths[0])
        counted = host.labels[host.loss_mask > 0]
        assert (counted >= 100).sum() == (min(rows[sample][1], most_input - 1) if is_gpt else lengths[1]) >= 1
        if is_gpt:
            assert batch.labels is not None and int(host.loss_mask.sum()) == batch.labels[at]
            rows_alone = collator(0, msgspec.structs.replace(plan, labels=(int(batch.labels[at]),)), family)
            assert rows_alone.rows is None or int(rows_alone.loss_mask.sum()) == batch.labels[at]


@pytest.mark.parametrize(("multiple", "rows"), [(8, 8), (16, 16), (64, None)])
def test_rows_of_labels_alone_have_the_lengths_of_the_settings(multiple, rows):
    """Where that is as many as all positions, there are none alone."""
    reader = [(10 + np.arange(40), 100 + np.arange(5))]
    collator = Collator(
        required=REQUIRED, reader=reader, special=SPECIAL, loss_on=LossOn.TARGETS, length_multiple=multiple
    )
    plan = msgspec.structs.replace(lists.micro_batch(Shape(1, 64), [45], [0], sample_ids=(0,)), labels=(5,))
    host = collator(0, plan, ModelFamily.GPT)
    assert (None if host.rows is None else len(host.rows)) == rows and int(host.loss_mask.sum()) == 5


def test_a_sample_that_was_planned_otherwise_is_refused():
    """As one of a conversation whose turns are others: its length is none that a cut gives."""
    reader = [(np.arange(9), np.arange(3))]
    spans = SpanTable(np.array([[0, 2, 4]]))
    cutter = Cutter(ModelFamily.GPT, (TruncationSide.LEFT,), spans)
    collator = Collator(required=REQUIRED, reader=reader, special=SPECIAL, cutter=cutter)
    plan = lists.micro_batch(Shape(1, 16), [10], [0], sample_ids=(0,))
    with pytest.raises(DataError, match="expected 10 tokens of sample 0 as planned, the dataset has 12"):
        collator(0, plan, ModelFamily.GPT)
