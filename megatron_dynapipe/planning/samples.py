"""A global batch as the planner sees it, and why one cannot be planned."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost import StageCosts, stage_costs
from megatron_dynapipe.errors import DataError, InfeasibleError
from megatron_dynapipe.planning.intervals import CutProblem, needed_bytes
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import ModelFamily, Shape, in_mb, input_positions, round_up, target_positions

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Samples with their lengths in tokens and in padded positions: int64[samples] each."""

    ids: IntArray
    input_tokens: IntArray
    target_tokens: IntArray
    inputs: IntArray
    targets: IntArray

    @classmethod
    def of(cls, batch: GlobalBatch, family: ModelFamily) -> Self:
        """Round the batch's lengths up to padded positions.

        Raises:
            DataError: an input, or a T5's target, is empty.
        """
        input_tokens = np.asarray(batch.input_lengths, np.int64)
        target_tokens = np.asarray(batch.target_lengths, np.int64)
        least = 1 if family is ModelFamily.T5 else 0
        wrong = np.flatnonzero((input_tokens < 1) | (target_tokens < least))
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"sample {batch.sample_ids[row]} has {input_tokens[row]} input and {target_tokens[row]} target tokens;"
                f" a {family} sample needs at least 1 and {least}"
            )
        return cls(
            ids=np.asarray(batch.sample_ids, np.int64),
            input_tokens=input_tokens,
            target_tokens=target_tokens,
            inputs=np.array([round_up(input_positions(family, n)) for n in input_tokens.tolist()], np.int64),
            targets=np.array([round_up(target_positions(family, n)) for n in target_tokens.tolist()], np.int64),
        )

    def padded(self, input_length: int | None, target_length: int | None) -> Self:
        """Every sample padded to these lengths, or where they are None to the batch's longest.

        Raises:
            DataError: a sample is longer.
        """
        longest = int(self.inputs.max()), int(self.targets.max())
        wanted = tuple(longest[i] if n is None else round_up(n) for i, n in enumerate((input_length, target_length)))
        if wanted[0] < longest[0] or wanted[1] < longest[1]:
            raise DataError(
                f"samples of up to {longest[0]} input and {longest[1]} target positions cannot be padded to"
                f" {wanted[0]} and {wanted[1]}",
                hint="truncate the samples, or pad to longer lengths",
            )
        inputs, targets = np.full_like(self.inputs, wanted[0]), np.full_like(self.targets, wanted[1])
        return replace(self, inputs=inputs, targets=targets)

    def shape(self, members: IntArray) -> Shape:
        """The padded shape of a micro-batch of these samples."""
        return Shape(len(members), int(self.inputs[members].max()), int(self.targets[members].max()))


def fits_alone(problem: CutProblem) -> BoolArray:
    """Whether each sample fits as a micro-batch of its own: bool[samples].

    Args:
        problem: the samples, with one micro-batch in flight under option 0.
    """
    fitting = [cost.feasible & (lack <= 0).all(axis=1) for cost, lack in _alone(problem)]
    return np.asarray(np.any(fitting, axis=0))


def _alone(problem: CutProblem) -> list[tuple[StageCosts, IntArray]]:
    """Costs of every sample on its own, and the memory `[samples, ranks]` it lacks, under each recompute mode."""
    ones = np.ones(len(problem.inputs), np.int64)
    costs = [stage_costs(mode, problem.layout, ones, problem.inputs, problem.targets) for mode in problem.modes]
    return [(cost, needed_bytes(cost, problem, 0) - problem.memory_bytes) for cost in costs]


def explain_infeasible(samples: Samples, problem: CutProblem) -> InfeasibleError:
    """Which sample fits no micro-batch even alone, and why: its stage, what it needs, what there is.

    Args:
        samples: the batch.
        problem: how it was to be cut, with one micro-batch in flight under option 0.
    """
    impossible = np.flatnonzero(~fits_alone(problem))
    if not len(impossible):
        return InfeasibleError(
            "every sample fits alone, but no schedule of their micro-batches fits the memory",
            hint="allow more recomputation, use more pipeline stages, or raise the memory limit",
        )
    row = int(impossible[0])
    where = f"sample {samples.ids[row]} of padded shape {samples.shape(impossible[:1])}"
    within = [lack[row] for cost, lack in _alone(problem) if cost.feasible[row]]
    if not within:
        return InfeasibleError(
            f"{where} lies outside the cost model's lengths, or ran out of memory when they were measured",
            hint="truncate or skip long samples, use more tensor parallelism, or profile longer lengths",
        )
    lack = min(within, key=lambda by_stage: int(by_stage.max()))
    stage = int(lack.argmax())
    there = int(problem.memory_bytes[stage])
    needed, available = in_mb(there + int(lack[stage]), there)
    return InfeasibleError(
        f"{where} needs {needed} of activations on stage {stage}, which has {available} besides its model state",
        hint="allow more recomputation, use more pipeline stages or tensor parallelism, or truncate long samples",
    )
