"""Fixed orders: 1F1B (Narayanan et al., SOSP 2019), interleaved 1F1B (Narayanan et al., SC 2021), GPipe.

stage 0 of 3   F0 F1 F2 B0 F3 B1 F4 B2 …  B4      each stage runs `depth` forwards, then one backward and one
stage 1 of 3   F0 F1 B0 F2 B1 F3 B2 …     B4      forward in turn, then the remaining backwards
stage 2 of 3   F0 B0 F1 B1 F2 B2 …        B4

GPipe (Huang et al., NeurIPS 2019) runs every forward, then every backward: each stage holds all micro-batches at once,
so it is for small cases. As forward-only order it serves evaluation.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_dynapipe.plan.instructions import Backward, Forward, Pass
from megatron_dynapipe.plan.transfer_rules import GLOO_RULES
from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem
from megatron_dynapipe.planning.simulate import simulate


def gpipe(problem: ScheduleProblem) -> PassOrder:
    """All forwards chunk by chunk, then all backwards in the same order of micro-batches, last chunk first."""
    rows, chunks = range(problem.micro_batches), range(problem.chunks)
    forwards = tuple(Forward(row, chunk) for chunk in chunks for row in rows)
    backwards = tuple(Backward(row, chunk) for chunk in reversed(chunks) for row in rows)
    return (forwards if problem.forward_only else forwards + backwards,) * problem.stages


def one_f_one_b(problem: ScheduleProblem, depths: Sequence[int] | None = None) -> PassOrder:
    """1F1B over the micro-batches in index order; interleaved where stages have several chunks.

    Args:
        problem: only its numbers of stages, chunks and micro-batches matter.
        depths: forwards per stage before its first backward, at least 1 and never rising from stage to stage; by
            default as many as fill the pipeline. A smaller depth holds fewer micro-batches in memory.
    """
    forwards, backwards = sequences(problem.micro_batches, problem.stages, problem.chunks)
    if problem.forward_only:
        return (forwards,) * problem.stages
    if depths is None:
        depths = default_depths(problem)
    assert len(depths) == problem.stages and min(depths) >= 1, depths
    assert all(ahead >= behind for ahead, behind in pairwise(depths)), depths
    return tuple(_alternate(forwards, backwards, depth) for depth in depths)


def one_f_one_b_within_memory(problem: ScheduleProblem) -> PassOrder:
    """1F1B with as many forwards ahead on each stage as its memory allows, at most the default number.

    Interleaved 1F1B has no smaller depths; it comes as it is.
    """
    problem = replace(problem, transfers=GLOO_RULES)  # the order alone says what is held
    depths = list(default_depths(problem))
    while True:
        order = one_f_one_b(problem, depths)
        peaks = simulate(problem, order).peak_bytes
        over = [stage for stage, peak in enumerate(peaks) if peak > problem.memory_limit_bytes and depths[stage] > 1]
        if problem.chunks > 1 or problem.forward_only or not over:
            return order
        depths = depths[: over[0]] + [min(depth, depths[over[0]] - 1) for depth in depths[over[0] :]]


def default_depths(problem: ScheduleProblem) -> tuple[int, ...]:
    """The depths that keep an even pipeline full: Megatron's, where it allows the number of micro-batches."""
    more = forwards_of_earlier_chunks(problem.micro_batches, problem.stages, problem.chunks)
    return tuple(depth + more for depth in filling_depths(problem.stages, problem.chunks))


def filling_depths(stages: int, chunks: int) -> tuple[int, ...]:
    """`default_depths` without `forwards_of_earlier_chunks`: they do not depend on the number of micro-batches."""
    return tuple((2 if chunks > 1 else 1) * (stages - 1 - stage) + 1 for stage in range(stages))


def forwards_of_earlier_chunks(micro_batches: int, stages: int, chunks: int, *, full: bool = True) -> int:
    """Forwards that a stage runs of the largest group before the group reaches its last chunk."""
    return (chunks - 1) * max(_groups(micro_batches, stages, full), default=0)


def sequences(
    micro_batches: int, stages: int, chunks: int, *, full: bool = True
) -> tuple[tuple[Forward, ...], tuple[Backward, ...]]:
    """The order of forwards and of backwards that all stages share: group by group, and in a group chunk by chunk."""
    forwards: list[Forward] = []
    backwards: list[Backward] = []
    first = 0
    for size in _groups(micro_batches, stages, full):
        rows = range(first, first + size)
        forwards += [Forward(row, chunk) for chunk in range(chunks) for row in rows]
        backwards += [Backward(row, chunk) for chunk in reversed(range(chunks)) for row in rows]
        first += size
    return tuple(forwards), tuple(backwards)


def _groups(micro_batches: int, stages: int, full: bool) -> list[int]:
    """Micro-batches that pass a chunk together: even groups of at least as many as there are stages, or at most.

    With full groups of g ≥ stages (or a single one), and depths by the largest, a stage's forward never waits for a
    backward that stands after it, whatever the number of micro-batches; Megatron's rule, groups of exactly `stages`, is
    the case in which the number divides.
    """
    count = max(micro_batches // stages if full else -(-micro_batches // stages), 1)
    small, larger = divmod(micro_batches, count)
    return [small + (group < larger) for group in range(count)]


def _alternate(forwards: Sequence[Pass], backwards: Sequence[Pass], depth: int) -> tuple[Pass, ...]:
    """`depth` forwards, then backward and forward in turn until both run out."""
    depth = min(depth, len(forwards))
    passes = list(forwards[:depth])
    for index, backward in enumerate(backwards):
        passes.append(backward)
        passes += forwards[depth + index : depth + index + 1]
    return tuple(passes)
