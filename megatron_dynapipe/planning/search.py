"""Improving a plan by local search on its predicted time: cut, recompute, replicas, order and depth together.

    cuts ──► dealt to replicas ──► orders × policies, simulated ──► the best two ──► random moves ──► the best, steadied

A solution is, per replica, micro-batches (runs of the sample order with a recompute mode) in the order in which they
enter the pipeline, and a policy of list scheduling (`schedules.list_scheduling`). A move

    reorder     moves a micro-batch to another place of its replica's order, or exchanges two
    shift       moves the border between two micro-batches that are neighbours in the sample order
    split       one micro-batch into two
    merge       two neighbours into one
    recompute   gives a micro-batch another mode
    deepen      changes how many micro-batches a rank may hold in flight, or the policy's rule
    hand over   gives a micro-batch to another replica, or exchanges two

and is judged by the makespan of the slowest replica, list-scheduled within every rank's memory. Worse solutions are
accepted within a margin of the best that shrinks to nothing (threshold accepting, Dueck and Scheuer 1990). The last
fifth of the search prepares for passes that take other times than predicted: of policies and moves that predict no
longer a time, those are taken whose order, kept as it is, takes less time over a few draws of noise. (With several
chunks per rank there is no such part.)

The search is bounded by a number of evaluations and seeded, so that the same batch has the same plan anywhere. Plain
1F1B over every cut is among the solutions it begins with.

The native core (`csrc/search.cpp`) and its Python twin (`search_in_python`) make the same moves and find the same
plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.plan.instructions import Pass
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.partition import Cut
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.planning.schedules.list_scheduling import order_of
from megatron_dynapipe.planning.search_in_python import Found, search_in_python
from megatron_dynapipe.planning.search_problem import SearchProblem

BUDGET = 150_000
"""Micro-batches on chunks that a search schedules by default, on all ranks."""
LEAST, MOST = 2500, 8000
"""Evaluations by default, however many or few micro-batches there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundReplica:
    """One replica's micro-batches in the order in which they enter the pipeline: int64[micro-batches] each."""

    firsts: IntArray
    """First sample of each, as a place in the order that was cut."""
    sizes: IntArray
    modes: IntArray
    order: tuple[tuple[Pass, ...], ...]
    """Passes per rank; micro-batches are numbered as they enter."""


def default_evaluations(cuts: Sequence[Cut], *, replicas: int, chunks: int) -> int:
    """Evaluations that take about the same time whatever the batch: fewer where each has more passes to schedule."""
    most = max((len(cut.sizes) for cut in cuts), default=0)
    return max(LEAST, min(MOST, BUDGET * replicas // max(most * chunks, 1)))


def search(problem: SearchProblem, cuts: Sequence[Cut], *, evaluations: int, seed: int) -> list[FoundReplica]:
    """The best solution found from the given cuts, per replica; an empty list where no cut fits the memory.

    Raises:
        PlanningError: costs or settings outside what 64-bit sums can hold; the message names which.
    """
    begin = [(cut.sizes, cut.modes) for cut in cuts]
    if NATIVE is None:
        found = search_in_python(problem, begin, evaluations=evaluations, seed=seed)
    else:
        found = _search_natively(problem, begin, evaluations, seed, NATIVE)
    layout = problem.layout
    return [
        FoundReplica(
            firsts=np.array(firsts, np.int64),
            sizes=np.array(sizes, np.int64),
            modes=np.array(modes, np.int64),
            order=order_of(
                np.array(forwards, np.int64).reshape(layout.stages, -1).tolist(), len(firsts), layout.chunks
            ),
        )
        for firsts, sizes, modes, _, forwards in found
    ]


def _search_natively(
    problem: SearchProblem,
    cuts: Sequence[tuple[IntArray, IntArray]],
    evaluations: int,
    seed: int,
    native: ModuleType,
) -> list[Found]:
    layout = problem.layout
    encoder, decoder = np.array(layout.encoder_split, np.int64), np.array(layout.decoder_split, np.int64)
    try:
        found: list[Found] = native.search(
            inputs=np.ascontiguousarray(problem.inputs),
            targets=np.ascontiguousarray(problem.targets),
            modes=[(t.sizes, t.inputs, t.targets, np.ascontiguousarray(t.values)) for t in problem.modes],
            chunks=layout.chunks,
            encoder_layers=encoder,
            decoder_layers=decoder,
            model_state=problem.model_state_bytes,
            memory_limit=problem.memory_limit_bytes,
            forward_only=problem.forward_only,
            replicas=problem.replicas,
            bytes_per_position=problem.bytes_per_position,
            decoder_forward=decoder[:-1] > 0,
            decoder_backward=encoder[1:] == 0,
            latency_ns=problem.links.latency_ns.ravel(),
            gbps=problem.links.gbps.ravel(),
            cuts=cuts,
            evaluations=evaluations,
            seed=seed,
            peak_covers_backward=problem.peak_covers_backward,
        )
    except ValueError as error:
        raise PlanningError(f"the batch's plan cannot be searched: {error}") from error
    return found
