"""GPipe (Huang et al., NeurIPS 2019): every forward pass, then every backward pass.

Each stage holds all micro-batches at once, so this is for small cases; as forward-only order it serves evaluation.
"""

from megatron_dynapipe.plan.instructions import Backward, Forward
from megatron_dynapipe.planning.problem import PassOrder, ScheduleProblem


def gpipe(problem: ScheduleProblem) -> PassOrder:
    """All forwards chunk by chunk, then all backwards in the same order of micro-batches, last chunk first."""
    rows, chunks = range(problem.micro_batches), range(problem.chunks)
    forwards = tuple(Forward(row, chunk) for chunk in chunks for row in rows)
    backwards = tuple(Backward(row, chunk) for chunk in reversed(chunks) for row in rows)
    return (forwards if problem.forward_only else forwards + backwards,) * problem.stages
