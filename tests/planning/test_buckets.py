"""Shape buckets: plans keep to them, padding is paid for, and without them nothing changes."""

from collections import Counter

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.plan.codec import decode_plan, encode
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.buckets import ANY_SHAPE, ShapeBuckets
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.units import BatchLayout, ModelFamily
from tests.planning.planner_cases import batch, planner
from tests.planning.planner_cases import settings as settings_of

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
PADDED, PACKED = (BatchLayout.PADDED,), (BatchLayout.PACKED,)
COARSE = ShapeBuckets(length_multiple=64, row_multiple=256, sizes_per_octave=2)


@pytest.mark.parametrize(
    ("per_octave", "sizes"),
    [
        (0, range(1, 41)),
        (1, (1, 2, 4, 8, 16, 32)),
        (2, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
        (4, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)),
        (8, (*range(1, 17), 18, 20, 22, 24, 26, 28, 30, 32, 36, 40)),
    ],
)
def test_the_grid_of_sizes(per_octave: int, sizes: tuple[int, ...]) -> None:
    buckets = ShapeBuckets(sizes_per_octave=per_octave)
    assert [size for size in range(1, 41) if buckets.allows(size)] == list(sizes)
    given = batch(GPT, 4)
    made = planner(GPT, buckets=buckets)
    problem = made.problem(made.samples(given))
    shapes = np.array([(size, 64, 0) for size in range(1, 41)])
    _, covered = problem.costs(shapes, np.zeros(40, np.int64))
    assert np.flatnonzero(covered).tolist() == [size - 1 for size in sizes], "the native core has the same rule"


def check(plan: IterationPlan, buckets: ShapeBuckets) -> None:
    for replica in plan.replicas:
        for mb in replica.micro_batches:
            packed = mb.layout is BatchLayout.PACKED
            multiple = buckets.row_multiple if packed else buckets.length_multiple
            assert mb.shape.input_length % multiple == 0 and mb.shape.target_length % multiple == 0
            assert packed or buckets.allows(mb.shape.size)
    assert decode_plan(encode(plan)) == plan


@pytest.mark.parametrize("family", [GPT, T5])
@pytest.mark.parametrize("layouts", [PADDED, PACKED, PADDED + PACKED], ids="-".join)
@pytest.mark.parametrize("replicas", [1, 3])
def test_plans_keep_to_their_buckets_and_have_fewer_shapes(
    family: ModelFamily, layouts: tuple[BatchLayout, ...], replicas: int
) -> None:
    given = [batch(family, 120, seed=seed) for seed in range(2)]
    found: Counter[str] = Counter()
    padded: Counter[str] = Counter()
    for name, buckets in (("any", msgspec.UNSET), ("coarse", COARSE)):
        made = planner(family, micro_batch_layouts=layouts, data_parallel=replicas, buckets=buckets)
        plans = [made.plan(each, 0) for each in given]
        for plan in plans:
            check(plan, made.settings.shape_buckets)
        found[name] = len(frozenset[object]().union(*(plan.shapes for plan in plans)))
        padded[name] = sum(plan.totals.padded_positions for plan in plans)
    if layouts != PACKED:  # rows are few, and of different lengths in both
        assert found["coarse"] < found["any"]
    assert padded["coarse"] > padded["any"]


@pytest.mark.parametrize("layouts", [PADDED, PACKED], ids="-".join)
def test_padding_is_paid_for(layouts: tuple[BatchLayout, ...]) -> None:
    """A sample of 30 tokens costs what one of 65 costs where both become 64 positions, and no more than that."""
    made = planner(GPT, micro_batch_layouts=layouts, buckets=ShapeBuckets(length_multiple=64, row_multiple=64))
    times = {}
    for length in (30, 65, 66):
        given = batch(GPT, 1)
        given.input_lengths[:] = length
        times[length] = made.plan(given, 0).totals.predicted_ns
    assert times[30] <= times[65] < times[66]
    if layouts == PADDED:
        assert times[30] == times[65]


@pytest.mark.parametrize("layouts", [PADDED, PADDED + PACKED], ids="-".join)
def test_without_buckets_nothing_changes(layouts: tuple[BatchLayout, ...]) -> None:
    plain, given = planner(GPT, micro_batch_layouts=layouts), batch(GPT, 60)
    assert b"buckets" not in msgspec.json.encode(plain.settings), "so that digests stay what they were"
    explicit = planner(GPT, micro_batch_layouts=layouts, buckets=ANY_SHAPE)
    one, other = plain.plan(given, 0), explicit.plan(given, 0)
    assert msgspec.structs.replace(other, settings_digest=one.settings_digest) == one
    assert explicit.digest != plain.digest
    assert len({planner(GPT, buckets=each).digest for each in (COARSE, ShapeBuckets(sizes_per_octave=2))}) == 2


def test_settings_travel_to_the_planner_process() -> None:
    for buckets in (msgspec.UNSET, COARSE):
        given = settings_of(T5, buckets=buckets)
        assert msgspec.json.decode(msgspec.json.encode(given), type=PlannerSettings) == given


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"length_multiple": 12}, "expected a length multiple that 8 divides"),
        ({"row_multiple": 0}, "expected a row multiple that 8 divides"),
        ({"sizes_per_octave": 3}, "expected sizes per octave of 0, 1, 2, 4, 8, got 3"),
    ],
)
def test_wrong_buckets(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShapeBuckets(**values)


def test_virtual_stages_plan_in_buckets() -> None:
    made = planner(GPT, chunks=2, encoder_layers=8, buckets=COARSE)
    check(made.plan(batch(GPT, 50), 0), COARSE)
