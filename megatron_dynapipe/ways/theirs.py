"""Micro-batches by the rule of another trainer, or of an earlier paper, which plans are compared with."""

from collections.abc import Sequence

from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.partition import Partitioner, candidate_orders
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.ways import Candidate


class Theirs:
    """The partitions that a rule makes, as they are.

    Args:
        rule: makes them.
        hidden_size: the model's.
    """

    def __init__(self, rule: Partitioner, hidden_size: int) -> None:
        self._rule = rule
        self._hidden_size = hidden_size

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """One candidate, which no search changes."""
        longest_first = candidate_orders(problem.inputs, problem.targets)[0]
        partitioned = self._rule.partitions(problem, longest_first, hidden_size=self._hidden_size)
        return [Candidate(samples=samples, problem=problem, partitioned=partitioned, searchable=False, is_default=True)]
