"""Stages with unequal replicas: the brute force's answer, costs by hand, and what cannot be planned."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import ConfigError, CostModelError, InfeasibleError
from megatron_dynapipe.costing import Network
from megatron_dynapipe.tools.tuning import Layer, LayerProfile, Topology, orchestrate
from megatron_dynapipe.tools.tuning.orchestrate import Assignment, OrchestrationProblem, one_f_one_b_codes
from megatron_dynapipe.tools.tuning.topology import Counts
from tests.helpers.examples import examples

SLOW = Network(devices_per_node=1, intra_node_gbps=8, inter_node_gbps=8, inter_node_latency_us=0)
"""A byte takes 1 ns over every link."""


def layer(forward_ms: float, *, boundary: float = 0, parameters: float = 0, stored: float = 0) -> Layer:
    sizes = {"boundary_bytes": boundary, "stored_bytes": stored, "parameter_bytes": parameters}
    return Layer(name="layer", forward_ms=(forward_ms,), backward_ms=(2 * forward_ms,), **sizes)


def profile(*layers: Layer) -> LayerProfile:
    return LayerProfile(name="test", sizes=(1,), layers=layers)


def cluster(devices: int, per_node: int = 1, memory: int | None = None) -> Topology:
    network = Network(devices_per_node=per_node, intra_node_gbps=80, inter_node_gbps=8, inter_node_latency_us=10)
    return Topology(devices=devices, network=network, memory_bytes=memory)


def every_placement(free: Counts) -> Iterator[tuple[Counts, Counts]]:
    """Devices of a stage on every node, without any symmetry, and what is left."""
    for counts in itertools.product(*(range(left + 1) for left in free)):
        if any(counts):
            yield counts, tuple(a - b for a, b in zip(free, counts, strict=True))


def every_plan(problem: OrchestrationProblem, layers: int, nodes: Counts) -> Iterator[Assignment]:
    def stages(done: int, free: Counts) -> Iterator[list[tuple[int, Counts]]]:
        if done == layers:
            yield []
        for end in range(done + 1, layers + 1):
            for counts, left in every_placement(free):
                yield from ([(end, counts), *rest] for rest in stages(end, left))

    for micro_batches, plan in itertools.product(problem.unit_sizes, list(stages(0, nodes))):
        ends, placements = zip(*plan, strict=True)
        yield Assignment(ends=ends, placements=placements, micro_batches=micro_batches)


numbers = st.integers(0, 40)


@settings(max_examples=examples(40))
@given(
    layers=st.lists(st.tuples(st.integers(1, 9), numbers, numbers, numbers), min_size=1, max_size=4),
    shape=st.sampled_from([(2, 1), (3, 1), (3, 2), (4, 2)]),
    units=st.sampled_from([1, 2, 3, 4]),
    memory=st.sampled_from([None, 100_000, 400_000]),
)
def test_the_best_of_all_plans(layers, shape, units, memory):
    devices, per_node = shape
    given_layers = [
        layer(ms, boundary=1000 * crossing, parameters=1000 * weights, stored=1000 * kept)
        for ms, crossing, weights, kept in layers
    ]
    nodes = cluster(devices, per_node, memory)
    problem = OrchestrationProblem(profile(*given_layers), 2, 2 * units, nodes)
    times = [problem.predicted_ns(plan) for plan in every_plan(problem, len(layers), nodes.nodes)]
    possible = [time for time in times if time is not None]
    if not possible:
        with pytest.raises(InfeasibleError, match="expected a plan of test whose stages fit"):
            orchestrate(profile(*given_layers), 2, 2 * units, nodes)
        return
    found = orchestrate(profile(*given_layers), 2, 2 * units, nodes)
    assert found.predicted_ms * 1e6 == pytest.approx(min(possible), abs=0.5)
    assert found.bound_ms <= found.predicted_ms
    assert sum(stage.end_layer - stage.first_layer for stage in found.stages) == len(layers)
    taken = [device for stage in found.stages for device in stage.devices]
    assert len(set(taken)) == len(taken) and set(taken) <= set(range(devices))


def test_costs_of_a_plan_by_hand():
    # Two units of one sample. Stage 0: 1 + 2 ms. Link: 0.5 ms. Stage 1: 1 + 2 ms.
    problem = OrchestrationProblem(
        profile(layer(1, boundary=500_000), layer(1)), 1, 2, Topology(devices=2, network=SLOW)
    )
    straight = Assignment(ends=(1, 2), placements=((1, 0), (0, 1)), micro_batches=1)
    # stage 0   F0 F1 ·············· B0 ── B1
    # stage 1   ·· · F0 B0 ──── F1 B1          F0 at 1.5, B0 to 4.5, F1 to 5.5, B1 to 7.5, sent to 8, B1 to 10
    assert problem.predicted_ns(straight) == 10_000_000
    plan = problem.orchestration(straight)
    assert plan.speedup == pytest.approx(12 / 10)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,)]


def test_a_reduction_overlaps_with_the_stages_before():
    weights = profile(layer(1), layer(1, parameters=1_000_000))
    problem = OrchestrationProblem(weights, 2, 2, Topology(devices=3, network=SLOW))
    # F0 to 2, halves on stage 1: F to 3, B to 5; then stage 0's B to 9, beside a reduction of 2 · 1/2 · 1 ms.
    # The other way round the halves are first: F to 1, F to 3, B to 7, B to 9.
    for placements in (((1, 0, 0), (0, 1, 1)), ((1, 1, 0), (0, 0, 1))):
        assert problem.predicted_ns(Assignment(ends=(1, 2), placements=placements, micro_batches=1)) == 9_000_000
    assert one_f_one_b_codes(3, 2).tolist() == [[0, 4, 1, 8, 5, 9], [0, 1, 4, 5, 8, 9]]


def test_what_has_many_weights_is_not_replicated():
    # The task's well-known case: convolutions on many devices, the large classifier on one.
    convolutions = [layer(10, boundary=1000, parameters=1000) for _ in range(7)]
    found = orchestrate(profile(*convolutions, layer(5, parameters=500_000_000)), 4, 32, cluster(4))
    *before, last = found.stages
    assert last.end_layer == 8 and last.replicas == 1
    assert sum(stage.replicas for stage in before) == 3 and max(stage.replicas for stage in before) > 1


@pytest.mark.parametrize(
    ("what", "stages", "latency_us", "ns_per_byte"),
    [
        ("transfer", ((2, 0), (0, 2)), 10, 1),  # all of it between the nodes
        ("transfer", ((2, 0), (1, 1)), 10, 0.5),  # half of it
        ("transfer", ((2, 1), (2, 1)), 0, 0.1 / 3),  # every replica sends its third to one beside it
        ("transfer", ((1, 0), (3, 0)), 0, 0.1),  # one device sends everything
        ("transfer", ((1, 1), (1, 1)), 0, 0.05),
        ("transfer", ((0, 1), (1, 0)), 10, 1),
        ("reduction", ((1, 0),), 0, 0),
        ("reduction", ((4, 0),), 0, 2 * 3 / 4 * 0.1),
        ("reduction", ((1, 1),), 20, 1),
        ("reduction", ((2, 1),), 20, 2 * 1 / 2 * 0.1 + 1),
    ],
)
def test_transfers_and_reductions(what, stages, latency_us, ns_per_byte):
    assert getattr(cluster(8, 4), what)(*stages) == (latency_us * 1e3, pytest.approx(ns_per_byte))


def test_placements():
    assert cluster(5, 2).nodes == (2, 2, 1)
    flat = cluster(16).placements
    assert len(flat.free) == 17  # which of like nodes are used does not matter
    assert len(flat.choices[0]) == 16
    two = cluster(16, 8).placements
    assert len(two.choices[0]) == 44  # (a, b) with a ≥ b, not both 0
    many = cluster(64, 8).placements  # too many to look at all: few kinds of placements
    assert {sum(many.counts[placement]) for placement, _ in many.choices[0]} == set(range(1, 65))
    assert cluster(6, 4).devices_of([(1, 1), (3, 1)]) == [(0, 4), (1, 2, 3, 5)]


def test_times_between_sizes_that_were_measured():
    one = Layer(name="", forward_ms=(2, 3), backward_ms=(4, 8), boundary_bytes=0, stored_bytes=0, parameter_bytes=0)
    measured = LayerProfile(name="two sizes", sizes=(2, 4), layers=(one,))
    found = [tuple(float(times[0]) / 1e6 for times in measured.times_ns(samples)) for samples in (1, 2, 3, 8)]
    assert found == [(1, 2), (2, 4), (2.5, 6), (6, 16)]
    assert measured.single_device_ms(4, 8) == 22


ONE = {"name": "test", "sizes": (1,), "layers": (layer(1),)}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: LayerProfile(**ONE | {"layers": ()}), CostModelError, "at least one layer"),
        (lambda: LayerProfile(**ONE | {"sizes": (2, 2)}), CostModelError, "rising numbers of samples"),
        (lambda: LayerProfile(**ONE | {"sizes": (1, 2)}), CostModelError, "a time for each of 2 sizes"),
        (lambda: profile(layer(float("nan"))), CostModelError, "times and sizes of at least 0"),
        (lambda: orchestrate(profile(layer(1)), 2, 3, cluster(2)), ConfigError, "a multiple of the micro-batch"),
        (lambda: orchestrate(profile(layer(1)), 0, 4, cluster(2)), ConfigError, "a multiple of the micro-batch"),
        (lambda: orchestrate(profile(layer(1)), 2, 0, cluster(2)), ConfigError, "a multiple of the micro-batch"),
        (lambda: cluster(0), ConfigError, "expected"),
        (lambda: cluster(65), ConfigError, "expected"),
        (lambda: cluster(2, memory=0), ConfigError, "expected"),
    ],
    ids=range(10),
)
def test_what_cannot_be(make, error, said):
    with pytest.raises(error, match=said):
        make()
