"""Other ways to make micro-batches: their partitions, what is not offered, packing, and whole plans."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.cost import LayerState, LayerTables, Network, PipelineLayout, Row
from megatron_dynapipe.errors import ConfigError, DataError, InfeasibleError
from megatron_dynapipe.plan.codec import digest
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings, baseline_partitions
from megatron_dynapipe.planning.packed_baselines import pack
from megatron_dynapipe.planning.partition import Partition
from megatron_dynapipe.planning.problem import BatchProblem
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.planning import planner_cases

DP, TOKENS, UNIFORM, PADDING, PACKING = list(PartitionAlgorithm)[:5]
GPT, T5 = ModelFamily.GPT, ModelFamily.T5


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def problem(inputs: list[int], targets: list[int] | None = None, *, memory: int = 10**9) -> BatchProblem:
    """Two stages of one layer; a position costs 1 ns forward, 2 ns backward and 1 byte."""
    family = GPT if targets is None else T5
    axes = ints(1, 64), ints(1, 64), ints(0) if targets is None else ints(1, 64)
    size, length, target = np.meshgrid(*axes, indexing="ij")
    values = np.zeros((len(Row), *size.shape), np.int64)
    for kind, positions in (("ENCODER", size * length), ("DECODER", size * target)):
        for what, cost in {"FORWARD": 1, "BACKWARD": 2, "STORED": 1, "PEAK": 1}.items():
            values[Row[f"{kind}_{what}"]] = cost * positions
    state = LayerState(embedding_bytes=0, encoder_bytes=0)
    tables = LayerTables(sizes=axes[0], inputs=axes[1], targets=axes[2], values=values, state=state)
    return BatchProblem(
        inputs=ints(*inputs),
        targets=ints(*(targets or [0] * len(inputs))),
        input_positions=ints(*inputs),
        target_positions=ints(*(targets or [0] * len(inputs))),
        layouts=tuple(BatchLayout),
        modes=(tables,),
        layout=PipelineLayout.equal(family, *((2, 0) if family is GPT else (1, 1)), 2, 1),
        model_state_bytes=ints(0, 0),
        memory_limit_bytes=memory,
        in_flight=ints(1, 1)[None],
        replicas=1,
        links=Network().links(virtual_stages=2, stages=2, ranks_per_stage=1),
        bytes_per_position=1,
    )


def offered(given: BatchProblem, **chosen: object) -> tuple[Partition, ...]:
    return baseline_partitions(given, np.arange(len(given.inputs)), PartitionSettings(**chosen))  # type: ignore[arg-type]


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
        pytest.param(
            {"algorithm": TOKENS, "micro_batch_tokens": 33}, [16, 8, 8], [[2, 1]], id="padded ones, not real ones"
        ),
        pytest.param({"algorithm": TOKENS, "micro_batch_tokens": 1}, [16, 8], [[1, 1]], id="at least one sample"),
        pytest.param({"algorithm": TOKENS}, [12, 12], [[1, 1], [2]], id="powers of two from the longest sample"),
    ],
)
def test_partitions(chosen: dict, inputs: list[int], expected: list[list[int]]) -> None:
    found = [partition.sizes.tolist() for partition in offered(problem(inputs), **chosen)]
    assert [sizes for i, sizes in enumerate(found) if sizes not in found[:i]] == expected


def test_tokens_count_inputs_and_targets() -> None:
    (found,) = offered(problem([16, 8, 8], [8, 8, 8]), algorithm=TOKENS, micro_batch_tokens=48)
    assert found.sizes.tolist() == [2, 1]


def test_partitions_that_do_not_fit_are_not_offered() -> None:
    found = offered(problem([16, 16, 16, 16], memory=32), algorithm=UNIFORM)
    assert [partition.sizes.tolist() for partition in found] == [[1, 1, 1, 1], [2, 2]]


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
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
        (
            {"algorithm": DP, "micro_batch_size": 2},
            "a micro-batch size goes with uniform, padding and packed rows, not with dp",
        ),
        ({"algorithm": UNIFORM, "micro_batch_tokens": 2}, "goes with token_based, not with uniform"),
    ],
)
def test_settings_that_do_not_go_together(chosen: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PartitionSettings(**chosen)


@pytest.mark.parametrize("family", [GPT, T5])
@pytest.mark.parametrize("algorithm", [TOKENS, UNIFORM, PADDING])
def test_whole_plans(family: ModelFamily, algorithm: PartitionAlgorithm) -> None:
    """Every sample once, shapes as the algorithm says, the same plan twice, never faster than the planner's own."""
    batch = planner_cases.batch(family, 24)

    def plan(chosen: PartitionAlgorithm):
        planner = planner_cases.planner(family, data_parallel=2, partition=PartitionSettings(algorithm=chosen))
        return planner.plan(batch, 0)

    found = plan(algorithm)
    micro_batches = [mb for replica in found.replicas for mb in replica.micro_batches]
    assert sorted(chain.from_iterable(mb.sample_ids for mb in micro_batches)) == sorted(batch.sample_ids.tolist())
    for mb in micro_batches:
        assert mb.shape.size == len(mb.sample_ids)
        assert mb.shape.input_length % 8 == 0 and mb.shape.input_length >= max(mb.input_lengths) - 1
    if algorithm is PADDING:
        assert len({mb.shape[1:] for mb in micro_batches}) == 1
    assert digest(plan(algorithm)) == digest(found)
    assert plan(DP).totals.predicted_ns <= found.totals.predicted_ns


def test_padding_to_given_lengths() -> None:
    chosen = PartitionSettings(
        algorithm=PADDING, micro_batch_size=4, padded_input_length=1020, padded_target_length=500
    )
    found = planner_cases.planner(T5, partition=chosen).plan(planner_cases.batch(T5, 8), 0)
    assert {mb.shape for replica in found.replicas for mb in replica.micro_batches} == {(4, 1024, 504)}


def test_padding_to_less_than_the_longest() -> None:
    chosen = PartitionSettings(algorithm=PADDING, padded_input_length=8)
    with pytest.raises(DataError, match="cannot be padded to 8 and"):
        planner_cases.planner(GPT, partition=chosen).plan(planner_cases.batch(GPT, 8), 0)


def test_a_given_size_that_does_not_fit() -> None:
    chosen = PartitionSettings(algorithm=PADDING, micro_batch_size=64)
    planner = planner_cases.planner(GPT, partition=chosen, memory_limit_bytes=60 * 10**6)
    with pytest.raises(InfeasibleError):
        planner.plan(planner_cases.batch(GPT, 64), 0)
