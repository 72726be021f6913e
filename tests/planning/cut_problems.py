"""Small random cutting problems, and the cut that trying everything finds."""

from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from megatron_dynapipe.cost import ABSENT, LayerState, LayerTables, PipelineLayout, Row
from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, Intervals
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.units import ModelFamily

STATE = LayerState(embedding_bytes=1, encoder_bytes=1, decoder_bytes=1)


@st.composite
def axes(draw: st.DrawFn, largest: int) -> IntArray:
    points = draw(st.sets(st.integers(1, largest), min_size=1, max_size=4))
    return np.array(sorted(points), np.int64)


@st.composite
def layer_tables(draw: st.DrawFn, family: ModelFamily) -> LayerTables:
    """A grid of arbitrary costs: neither rising nor smooth, some points absent."""
    sizes, inputs = draw(axes(8)), draw(axes(64))
    targets = draw(axes(64)) if family is ModelFamily.T5 else np.zeros(1, np.int64)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    highest = draw(st.sampled_from([3, 100, 10**7]))
    values = random.integers(0, highest, (len(Row), len(sizes), len(inputs), len(targets)), endpoint=True)
    absent = random.random(values.shape[1:]) < draw(st.sampled_from([0, 0.1, 0.4]))
    values[:, absent] = ABSENT
    return LayerTables(sizes=sizes, inputs=inputs, targets=targets, values=values, state=STATE)


@st.composite
def layouts(draw: st.DrawFn, family: ModelFamily) -> PipelineLayout:
    stages, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    split = draw(st.lists(st.integers(1, 3), min_size=stages * chunks, max_size=stages * chunks))
    if family is ModelFamily.T5 and sum(split) < 2:
        split = [2]
    encoder = draw(st.integers(1, sum(split) - 1)) if family is ModelFamily.T5 else sum(split)
    return PipelineLayout(
        family=family,
        encoder_layers=encoder,
        decoder_layers=sum(split) - encoder,
        layers_per_stage=tuple(split),
        chunks=chunks,
    )


@st.composite
def cut_problems(draw: st.DrawFn, most_samples: int = 9) -> CutProblem:
    family = draw(st.sampled_from(list(ModelFamily)))
    samples = draw(st.integers(1, most_samples))
    lengths = st.lists(st.integers(1, 66), min_size=samples, max_size=samples)
    layout = draw(layouts(family))
    memory = draw(st.sampled_from([50, 1000, 10**9]))
    in_flight = st.lists(st.integers(1, 4), min_size=layout.stages, max_size=layout.stages)
    return CutProblem(
        inputs=np.array(draw(lengths), np.int64),
        targets=np.array(draw(lengths) if family is ModelFamily.T5 else [0] * samples, np.int64),
        modes=tuple(draw(st.lists(layer_tables(family), min_size=1, max_size=3))),
        layout=layout,
        memory_bytes=np.full(layout.stages, memory, np.int64),
        in_flight=np.array(draw(st.lists(in_flight, min_size=1, max_size=3)), np.int64),
        replicas=draw(st.integers(1, 3)),
        forward_only=draw(st.booleans()),
    )


def brute_force(costs: Intervals, replicas: int, chunks: int) -> int | None:
    """The least objective over every way to cut and every choice of modes, or None."""
    samples, _, modes = costs.time_ns.shape
    best: int | None = None
    for breaks in product([False, True], repeat=samples - 1):
        edges = [0, *(i + 1 for i, here in enumerate(breaks) if here), samples]
        runs = list(pairwise(edges))
        if any(end - start > costs.time_ns.shape[1] for start, end in runs):
            continue
        for chosen in product(range(modes), repeat=len(runs)):
            entries = [(start, end - start - 1, mode) for (start, end), mode in zip(runs, chosen, strict=True)]
            times = [int(costs.time_ns[entry]) for entry in entries]
            if max(times) >= UNREACHABLE:
                continue
            value = max(int(costs.fill_ns[entry]) for entry in entries) * replicas + sum(times) * chunks
            best = value if best is None else min(best, value)
    return best
