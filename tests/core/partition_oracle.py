"""Small random batches, and the best partition of an order that trying everything finds."""

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from megatron_dynapipe.core.costs import ATTENTION, DECODER_MLP, MLP
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import (
    ABSENT,
    CostTables,
    Kind,
    Model,
    Network,
    PipelineLayout,
    Quantity,
    model_of_layers,
)
from megatron_dynapipe.costing.links import links_between
from tests.helpers.stage_costs import STATE, stage_costs


@st.composite
def axes(draw: st.DrawFn, largest: int) -> IntArray:
    points = draw(st.sets(st.integers(1, largest), min_size=1, max_size=4))
    return np.array(sorted(points), np.int64)


@st.composite
def cost_tables(draw: st.DrawFn, kinds: tuple[Kind, ...]) -> CostTables:
    """A grid of arbitrary costs: neither rising nor smooth, some points absent."""
    sizes, inputs = draw(axes(8)), draw(axes(64))
    targets = draw(axes(64)) if DECODER_MLP in kinds else np.zeros(1, np.int64)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    highest = draw(st.sampled_from([3, 100, 10**7]))
    shape = (len(kinds), len(Quantity), len(sizes), len(inputs), len(targets))
    values = random.integers(0, highest, shape, endpoint=True)
    absent = random.random(shape[2:]) < draw(st.sampled_from([0, 0.1, 0.4]))
    values[:, :, absent] = ABSENT
    return CostTables(kinds=kinds, sizes=sizes, inputs=inputs, targets=targets, values=values, state=STATE)


@st.composite
def pipeline_layouts(draw: st.DrawFn, family: ModelFamily) -> PipelineLayout:
    stages, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    halves = draw(st.sampled_from([st.sampled_from([2, 4, 6]), st.integers(1, 6)]))
    counts = draw(st.lists(halves, min_size=stages * chunks, max_size=stages * chunks))
    counts[-1] += sum(counts) % 2
    if family is ModelFamily.T5 and sum(counts) < 4:
        counts[-1] += 2
    layers = sum(counts) // 2
    encoder = draw(st.integers(1, layers - 1)) if family is ModelFamily.T5 else layers
    experts: tuple[int, ...] = ()
    model = None
    if family is ModelFamily.GPT and draw(st.booleans()):  # modules in any order, each of them a layer
        kinds = tuple(draw(st.sampled_from([ATTENTION, MLP, "another"])) for _ in range(sum(counts)))
        model = Model(encoder=kinds, modules_per_layer=1)
    elif family is ModelFamily.GPT and layers > 1 and draw(st.booleans()):
        experts = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=layers - 1))))
    model = model or model_of_layers(family, encoder, layers - encoder, expert_layers=experts)
    return PipelineLayout(model=model, modules_per_stage=tuple(counts), chunks=chunks)


@st.composite
def batch_problems(
    draw: st.DrawFn, most_samples: int = 9, *, layouts: tuple[BatchLayout, ...] = (BatchLayout.PADDED,)
) -> BatchProblem:
    family = draw(st.sampled_from(list(ModelFamily)))
    samples = draw(st.integers(1, most_samples))
    lengths = st.lists(st.integers(1, 66), min_size=samples, max_size=samples)
    inputs = np.array(draw(lengths), np.int64)
    targets = np.array(draw(lengths) if family is ModelFamily.T5 else [0] * samples, np.int64)
    layout = draw(pipeline_layouts(family))
    in_flight = st.lists(st.integers(1, 4), min_size=layout.stages, max_size=layout.stages)
    modes = draw(st.lists(cost_tables(tuple(dict.fromkeys(layout.modules))), min_size=1, max_size=3))
    return BatchProblem(
        inputs=inputs,
        targets=targets,
        input_positions=inputs,
        target_positions=targets,
        batch_layouts=layouts,
        modes=tuple(modes),
        layout=layout,
        model_state_bytes=np.full(layout.stages, 10, np.int64),
        memory_limit_bytes=10 + draw(st.sampled_from([50, 1000, 10**9])),
        in_flight=np.array(draw(st.lists(in_flight, min_size=1, max_size=3)), np.int64),
        replicas=draw(st.integers(1, 3)),
        links=links_between(Network(), virtual_stages=layout.virtual_stages, stages=layout.stages, ranks_per_stage=1),
        bytes_per_position=2,
        held_per_position=2,
        forward_only=draw(st.booleans()),
    )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One micro-batch of neighbours: its time on its slowest stage, and on all others together."""

    size: int
    mode: int
    time: int
    warmup: int


def candidates(problem: BatchProblem, option: int) -> list[list[Candidate]]:
    """The micro-batches that may begin at each sample: covered by the cost model, and within the memory."""
    samples = len(problem.inputs)
    return [
        [
            found
            for size in range(1, samples - first + 1)
            for mode in range(len(problem.modes))
            if (found := candidate(problem, option, first, size, mode)) is not None
        ]
        for first in range(samples)
    ]


def candidate(problem: BatchProblem, option: int, first: int, size: int, mode: int) -> Candidate | None:
    members = slice(first, first + size)
    lengths = problem.inputs[members].max(keepdims=True), problem.targets[members].max(keepdims=True)
    costs = stage_costs(problem.modes[mode], problem.layout, np.array([size]), *lengths)
    if not costs.feasible[0]:
        return None
    by_stage = (problem.layout.chunks, problem.layout.stages)
    times = costs.forward_ns[0] + (0 if problem.forward_only else costs.backward_ns[0])
    stage_times = times.reshape(by_stage).sum(axis=0)
    stored = costs.stored_bytes[0].reshape(by_stage)
    above = costs.peak_bytes[0].reshape(by_stage) - stored
    held = np.ones(by_stage[1], np.int64) if problem.forward_only else problem.in_flight[option]
    messages = message_bytes(problem, size * int(lengths[0][0]), size * int(lengths[1][0]), np.tile(held, by_stage[0]))
    needed = problem.model_state_bytes + stored.sum(axis=0) * held + above.max(axis=0)
    needed += messages.reshape(by_stage).max(axis=0)
    if (needed > problem.memory_limit_bytes).any():
        return None
    slowest = int(stage_times.max())
    return Candidate(size, mode, slowest, int(stage_times.sum()) - slowest)


def message_bytes(problem: BatchProblem, inputs: int, targets: int, held: IntArray) -> IntArray:
    """Two inputs, two gradients, and what virtual stages that hold so many micro-batches have sent."""
    forward, backward = (
        np.array([0, *(inputs + targets * decoder for decoder in both), 0], np.int64) * problem.held_per_position
        for both in (problem.layout.decoder_state_forward, problem.layout.decoder_state_backward)
    )
    if problem.forward_only:
        return np.asarray(2 * forward[:-1] + 4 * forward[1:])
    sent = np.maximum(forward[1:], backward[:-1])
    return np.asarray(2 * forward[:-1] + 2 * backward[1:] + (held + (held > 1)) * sent)


def brute_force(problem: BatchProblem, option: int) -> tuple[list[int], list[int], int, int] | None:
    """(sizes, modes, warm-up, total) of the best partition of the order as it is, or None.

    Of equal objectives that of the least warm-up, then of the first smaller size or earlier mode.
    """
    possible = candidates(problem, option)
    best: tuple[int, int, list[tuple[int, int]], int] | None = None
    samples = len(possible)
    for borders in product([False, True], repeat=samples - 1):
        edges = [0, *(i + 1 for i, here in enumerate(borders) if here), samples]
        choices = [[each for each in possible[i] if each.size == end - i] for i, end in pairwise(edges)]
        for chosen in product(*choices):
            warmup, total = max(each.warmup for each in chosen), sum(each.time for each in chosen)
            objective = warmup * problem.replicas + total * problem.layout.chunks
            found = objective, warmup, [(each.size, each.mode) for each in chosen], total
            best = found if best is None else min(best, found)
    if best is None:
        return None
    _, warmup, path, total = best
    return [size for size, _ in path], [mode for _, mode in path], warmup, total
