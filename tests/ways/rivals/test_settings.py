"""Other ways to make micro-batches: their partitions, what is not offered, packing, and whole plans."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import ConfigError, DataError, InfeasibleError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import Partition
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.ways.rivals.packed import pack
from megatron_dynapipe.ways.rivals.settings import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.ways.rules import verify
from tests.core import planner_cases
from tests.helpers.examples import examples

TOKENS, UNIFORM, PADDING, PACKING = list(PartitionAlgorithm)[:4]
GPT, T5 = ModelFamily.GPT, ModelFamily.T5


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def problem(inputs: list[int], targets: list[int] | None = None, **changes: object) -> BatchProblem:
    """On two stages; a target of 5 tokens takes 8 positions."""
    planner = planner_cases.planner(GPT if targets is None else T5, **changes)
    return planner.problem(planner.samples(planner_cases.of_lengths(inputs, targets)))


def offered(given: BatchProblem, **chosen: object) -> tuple[Partition, ...]:
    chosen_settings = PartitionSettings(**chosen)  # type: ignore[arg-type]
    return chosen_settings.partitions(given, np.arange(len(given.inputs)), hidden_size=1).partitions


@pytest.mark.parametrize(
    ("chosen", "inputs", "expected"),
    [
        pytest.param({"algorithm": UNIFORM, "micro_batch_size": 2}, [8, 8, 8, 8], [[2, 2]], id="as many to each"),
        pytest.param({"algorithm": UNIFORM, "micro_batch_size": 3}, [8, 8, 8, 8], [[3, 1]], id="the rest to the last"),
        pytest.param({"algorithm": UNIFORM, "micro_batch_size": 9}, [8, 8], [[2]], id="no more than there are"),
        pytest.param({"algorithm": UNIFORM}, [8, 8, 8], [[1, 1, 1], [2, 1], [3]], id="powers of two are tried"),
        pytest.param({"algorithm": PADDING, "micro_batch_size": 2}, [8, 8, 8], [[2, 1]], id="padded samples alike"),
        pytest.param(
            {"algorithm": TOKENS, "micro_batch_tokens": 32}, [32, 16, 16, 8, 8, 8, 8], [[1, 2, 4]], id="positions"
        ),
        pytest.param({"algorithm": TOKENS, "micro_batch_tokens": 33}, [16, 8, 8], [[2, 1]], id="padded, not real"),
        pytest.param({"algorithm": TOKENS, "micro_batch_tokens": 1}, [16, 8], [[1, 1]], id="at least one sample"),
        pytest.param({"algorithm": TOKENS}, [12, 12], [[1, 1], [2]], id="powers of two from the longest sample"),
    ],
)
def test_partitions(chosen: dict, inputs: list[int], expected: list[list[int]]) -> None:
    found = [partition.sizes.tolist() for partition in offered(problem(inputs), **chosen)]
    assert [sizes for i, sizes in enumerate(found) if sizes not in found[:i]] == expected


def test_tokens_count_targets_and_what_does_not_fit_is_not_offered() -> None:
    found, *_ = offered(problem([16, 8, 8], [5, 5, 5]), algorithm=TOKENS, micro_batch_tokens=48)
    assert found.sizes.tolist() == [2, 1]
    fitting = offered(problem([16, 16, 16, 16], memory_limit_bytes=20_500_000), algorithm=UNIFORM)
    assert {tuple(partition.sizes) for partition in fitting} == {(1, 1, 1, 1), (2, 2)}, "under any recompute mode"


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.sampled_from([TOKENS, UNIFORM, PADDING]),
    st.none() | st.integers(1, 200),
)
def test_every_sample_once(inputs: list[int], algorithm: PartitionAlgorithm, number: int | None) -> None:
    name = "micro_batch_tokens" if algorithm is TOKENS else "micro_batch_size"
    found = offered(problem(inputs), **{"algorithm": algorithm, name: number})
    assert found
    for each in found:
        assert each.sizes.min() >= 1 and each.sizes.sum() == len(inputs) and len(each.modes) == len(each.sizes)


@pytest.mark.parametrize(
    ("inputs", "targets", "rows", "expected"),
    [
        pytest.param([8, 8], [0, 0], (16, 0), [[0, 1]], id="into one row"),
        pytest.param([8, 16, 8], [0, 0, 0], (16, 0), [[1], [0, 2]], id="longest first"),
        pytest.param([8, 8], [9, 8], (16, 16), [[0], [1]], id="targets must fit too"),
        pytest.param([12, 10, 6, 4], [0] * 4, (16, 0), [[0, 3], [1, 2]], id="the first row that fits"),
    ],
)
def test_pack(inputs: list[int], targets: list[int], rows: tuple[int, int], expected: list[list[int]]) -> None:
    assert [row.tolist() for row in pack(ints(*inputs), ints(*targets), *rows)] == expected


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=30))
def test_packed_rows_hold_every_sample_once(lengths: list[tuple[int, int]]) -> None:
    inputs, targets = np.array(lengths, np.int64).T
    rows = pack(inputs, targets, 50, 50)
    assert sorted(chain.from_iterable(row.tolist() for row in rows)) == list(range(len(lengths)))
    assert all(inputs[row].sum() <= 50 and targets[row].sum() <= 50 for row in rows)


def test_samples_longer_than_a_row() -> None:
    with pytest.raises(ConfigError, match="rows of 16 input and 8 target positions cannot hold samples of up to 24"):
        pack(ints(24), ints(8), 16, 8)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"algorithm": PACKING}, "lets them attend to one another"),
        ({"algorithm": UNIFORM, "micro_batch_tokens": 2}, "goes with token_based, not with uniform"),
        ({"algorithm": PartitionAlgorithm.VERL, "micro_batch_size": 2}, "and packed rows, not with verl"),
    ],
)
def test_settings_that_do_not_go_together(chosen: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PartitionSettings(**chosen)


def plan(family: ModelFamily, samples: int, partition: dict[str, Any] | None, **changes: object) -> IterationPlan:
    chosen = None if partition is None else PartitionSettings(**partition)
    planner = planner_cases.planner(family, partition=chosen, **changes)
    return planner.plan(planner_cases.batch(family, samples), 0)


@pytest.mark.parametrize("family", [GPT, T5])
@pytest.mark.parametrize("algorithm", [TOKENS, UNIFORM, PADDING])
def test_whole_plans(family: ModelFamily, algorithm: PartitionAlgorithm) -> None:
    """Every sample once, shapes as the algorithm says, the same plan twice, never faster than the planner's own."""
    chosen = {"algorithm": algorithm}
    found, again, own = (plan(family, 24, partition, data_parallel=2) for partition in (chosen, chosen, None))
    verify(found, expected_samples=range(100, 124))
    if algorithm is PADDING:
        assert len({mb.shape[1:] for replica in found.replicas for mb in replica.micro_batches}) == 1
    assert digest(again) == digest(found)
    assert own.totals.predicted_ns <= found.totals.predicted_ns


def test_padding_to_given_lengths() -> None:
    lengths = {"algorithm": PADDING, "padded_input_length": 1020, "padded_target_length": 500}
    found = plan(T5, 8, lengths | {"micro_batch_size": 4})
    assert {mb.shape for replica in found.replicas for mb in replica.micro_batches} == {(4, 1024, 504)}
    with pytest.raises(DataError, match="cannot be padded to 8 and"):
        plan(GPT, 8, {"algorithm": PADDING, "padded_input_length": 8})
    with pytest.raises(InfeasibleError):
        plan(GPT, 64, {"algorithm": PADDING, "micro_batch_size": 64}, memory_limit_bytes=60 * 10**6)


ROWS = {"micro_batch_layouts": (BatchLayout.PACKED,), "schedule": ScheduleSettings(method="1f1b")}


@pytest.mark.parametrize("algorithm", ["packed_rows", "verl", "slime"])
@pytest.mark.parametrize("family", ModelFamily)
def test_rows_are_planned_with_one_mode_and_1f1b(family: ModelFamily, algorithm: str) -> None:
    planned = plan(family, 30, {"algorithm": PartitionAlgorithm(algorithm)}, data_parallel=2, **ROWS)
    verify(planned, expected_samples=range(100, 130))
    batches = [mb for replica in planned.replicas for mb in replica.micro_batches]
    assert {mb.layout for mb in batches} == {BatchLayout.PACKED}
    assert len({mode for mb in batches for mode in mb.recompute}) == 1


@pytest.mark.parametrize("family", ModelFamily)
def test_rows_to_a_micro_batch(family: ModelFamily) -> None:
    """As many as are asked for; else of 1, 2, 3 … the fastest."""
    chosen = {"algorithm": PartitionAlgorithm.PACKED_ROWS, "padded_input_length": 512}
    chosen |= {"padded_target_length": None if family is GPT else 256}

    def of(rows: int | None) -> IterationPlan:
        return plan(family, 30, chosen | {"micro_batch_size": rows}, **ROWS)

    counts = {rows: len(of(rows).replicas[0].micro_batches) for rows in (1, 2, 3)}
    assert counts[2] == -(-counts[1] // 2) and counts[3] == -(-counts[1] // 3)
    predicted = [of(rows).totals.predicted_ns for rows in range(1, counts[1] + 1)]
    assert of(None).totals.predicted_ns == min(predicted)
