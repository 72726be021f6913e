"""Packed rows as others make them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.packed_baselines import pack
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.planning.planner_cases import batch, planner


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=40))
def test_rows_hold_every_sample_once_and_are_not_too_long(lengths: list[tuple[int, int]]) -> None:
    inputs, targets = ints(*(n for n, _ in lengths)), ints(*(n for _, n in lengths))
    rows = pack(inputs, targets, 20, 9)
    assert sorted(np.concatenate(rows)) == list(range(len(lengths)))
    assert all(inputs[row].sum() <= 20 and targets[row].sum() <= 9 for row in rows)


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rows of 4 input and 0 target positions cannot hold samples of up to 5 and 0"
    ):
        pack(ints(5), ints(0), 4, 0)


@pytest.mark.parametrize("algorithm", ["packed_rows", "dp_balanced", "verl", "slime"])
@pytest.mark.parametrize("family", ModelFamily)
def test_they_are_planned_with_one_mode_and_1f1b(family: ModelFamily, algorithm: str) -> None:
    partition = PartitionSettings(algorithm=PartitionAlgorithm(algorithm))
    planned = planner(
        family,
        micro_batch_layouts=(BatchLayout.PACKED,),
        partition=partition,
        schedule=ScheduleSettings(method="1f1b"),
        data_parallel=2,
    ).plan(batch(family, 30), 0)
    verify(planned, expected_samples=range(100, 130))
    batches = [mb for replica in planned.replicas for mb in replica.micro_batches]
    assert {mb.layout for mb in batches} == {BatchLayout.PACKED} and len({mb.recompute for mb in batches}) == 1


@pytest.mark.parametrize("family", ModelFamily)
def test_rows_to_a_micro_batch(family: ModelFamily) -> None:
    """As many as are asked for; else of all powers of two the fastest."""

    def plan(rows: int | None) -> IterationPlan:
        partition = PartitionSettings(
            algorithm=PartitionAlgorithm.PACKED_ROWS,
            micro_batch_size=rows,
            padded_input_length=512,
            padded_target_length=None if family is ModelFamily.GPT else 256,
        )
        settings = {"micro_batch_layouts": (BatchLayout.PACKED,), "schedule": ScheduleSettings(method="1f1b")}
        return planner(family, partition=partition, **settings).plan(batch(family, 30), 0)

    counts = {rows: len(plan(rows).replicas[0].micro_batches) for rows in (1, 2, 3)}
    assert counts[2] == -(-counts[1] // 2) and counts[3] == -(-counts[1] // 3)
    powers = [1 << power for power in range(counts[1].bit_length())]
    predicted = {rows: plan(rows).totals.predicted_ns for rows in powers}
    assert plan(None).totals.predicted_ns == min(predicted.values())
