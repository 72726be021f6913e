"""What of the gradients' reduction and the parameters' gathering passes hide, where a run overlaps them.

Megatron reduces a bucket of gradients when the last backward of its chunk has made them all, and gathers a bucket of
parameters before the first forward that needs it. The first pipeline stage has several buckets, the others one:

    last backward   [ bucket 3 | bucket 2 | bucket 1 ]
    reduction                  [     3    ][    2     ][    1     ]
                                                      └── exposed ─┘
    gathering       [ 1 ][ 2 ][ 3 ]
    first forward        [ bucket 1 | bucket 2 | bucket 3 ]
                    └ exposed

A later stage ends its last backward earlier and begins its first forward later than the first one, which hides more.
That reductions' kernels slow passes' kernels down is not counted. Sources: Megatron's `DistributedDataParallel`
(bucket_size) and `_ParamAndGradBuffer`.
"""

import math
from collections.abc import Sequence

import msgspec

from megatron_dynapipe.core.instructions import BackwardInput, Forward, Pass
from megatron_dynapipe.core.plan import IterationPlan

LEAST_BUCKET, BUCKET_OF_REPLICA = 40_000_000, 1_000_000
"""Parameters of a bucket: at least so many, and so many for each replica."""

Span = tuple[int, int]
"""Start and end of a pass, in ns."""


class EdgePasses(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of a plan between which no gradient is whole, and no parameter may be missing.

    Attributes:
        first: by pipeline rank, the first forward of each chunk, in the order in which they run; of several replicas
            the earliest.
        last: the last backward of each chunk, likewise; of several replicas the latest: all reduce together.
        end_ns: when the plan ends.
    """

    first: tuple[tuple[Span, ...], ...]
    last: tuple[tuple[Span, ...], ...]
    end_ns: int


def edge_passes(plan: IterationPlan) -> EdgePasses:
    """The times of a plan, as it predicts them."""
    first: list[dict[int, Span]] = [{} for _ in range(plan.pipeline_stages)]
    last: list[dict[int, Span]] = [{} for _ in range(plan.pipeline_stages)]
    for replica in plan.replicas:
        for stage in replica.stages:
            for event in stage.predicted:
                step = event.instruction
                span = (event.start_ns, event.end_ns)
                if isinstance(step, Forward):
                    known = first[stage.stage].get(step.chunk)
                    first[stage.stage][step.chunk] = span if known is None else min(known, span)
                elif isinstance(step, Pass) and not isinstance(step, BackwardInput):
                    known = last[stage.stage].get(step.chunk, (0, 0))
                    last[stage.stage][step.chunk] = max(known, span, key=lambda of: of[1])
    return EdgePasses(
        first=tuple(tuple(sorted(of.values())) for of in first),
        last=tuple(tuple(sorted(of.values(), key=lambda span: span[1])) for of in last),
        end_ns=plan.totals.predicted_ns,
    )


def buckets(parameters: int, replicas: int, stage: int) -> int:
    """In how many parts a stage's gradients are reduced."""
    size = max(LEAST_BUCKET, BUCKET_OF_REPLICA * replicas)
    return max(1, -(-parameters // size)) if stage == 0 else 1


def exposed_reduction_ns(edges: EdgePasses, reduction_ns: int, counts: Sequence[int]) -> int:
    """How much later than the plan the reduction ends, on the stage where it does last.

    Args:
        edges: a plan's.
        reduction_ns: time to reduce all gradients of a stage.
        counts: buckets of each stage.
    """
    ends = [edges.end_ns]
    for spans, parts in zip(edges.last, counts, strict=True):
        done = 0.0
        each = reduction_ns / parts / max(len(spans), 1)
        for start, end in spans:
            for part in range(1, parts + 1):
                done = max(done, start + (end - start) * part / parts) + each
        ends.append(math.ceil(done))
    return max(ends) - edges.end_ns


def exposed_gathering_ns(edges: EdgePasses, gathering_ns: int, counts: Sequence[int]) -> int:
    """How long parameters hold up the first forwards, on the stage that waits longest."""
    late = [0]
    for spans, parts in zip(edges.first, counts, strict=True):
        done = 0.0
        each = gathering_ns / parts / max(len(spans), 1)
        for start, end in spans:
            for part in range(parts):
                done += each
                late.append(math.ceil(done - (start + (end - start) * part / parts)))
    return max(late)
