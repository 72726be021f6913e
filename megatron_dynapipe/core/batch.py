"""A global batch as the planner sees it, and why one cannot be planned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import ABSENT, LARGEST_COST
from megatron_dynapipe.core.errors import DataError, InfeasibleError
from megatron_dynapipe.core.plan import Piece
from megatron_dynapipe.core.problem import BatchProblem, BoolArray, IntArray
from megatron_dynapipe.core.units import (
    LENGTH_MULTIPLE,
    ModelFamily,
    in_mb,
    input_positions,
    target_positions,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """The samples of one iteration, with their lengths in tokens after truncation.

    The same sample can occur twice where an iteration spans two epochs, or a mixture repeats a small task.

    Attributes:
        iteration: number of the iteration, from 0.
        sample_ids: int64[n], documents of the split.
        input_lengths: int32[n]; for decoder-only models, of input and target together.
        target_lengths: int32[n]; 0 for decoder-only models.
        labels: int32[n], positions of decoder-only samples that count; None where all do.
    """

    iteration: int
    sample_ids: npt.NDArray[np.int64]
    input_lengths: npt.NDArray[np.int32]
    target_lengths: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32] | None = None

    @classmethod
    def of_lengths(
        cls,
        inputs: npt.ArrayLike,
        targets: npt.ArrayLike = 0,
        *,
        labels: npt.ArrayLike | None = None,
        iteration: int = 0,
    ) -> "GlobalBatch":
        """Samples of these lengths, numbered by their places."""
        input_lengths = np.array(inputs, np.int32)
        return cls(
            iteration=iteration,
            sample_ids=np.arange(len(input_lengths)),
            input_lengths=input_lengths,
            target_lengths=np.zeros_like(input_lengths) + np.asarray(targets, np.int32),
            labels=None if labels is None else np.asarray(labels, np.int32),
        )

    @classmethod
    def of_positions(cls, lengths: Sequence[int], iteration: int) -> "GlobalBatch":
        """Samples of so many positions, numbered by their places.

        A sample of n positions counts as n + 1 tokens: a decoder-only one trains on one position less than it has.
        """
        return cls.of_lengths(np.asarray(lengths, np.int32) + 1, iteration=iteration)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def tokens(self) -> int:
        """Tokens of all samples, inputs and targets."""
        return int(self.input_lengths.sum() + self.target_lengths.sum())

    def parts(self, tokens: int) -> list["GlobalBatch"]:
        """Its samples, in order, as batches of about so many tokens; the batch alone where it is no larger."""
        parts = min(round(self.tokens / tokens), len(self))
        if parts <= 1:
            return [self]
        ends = np.cumsum(self.input_lengths.astype(np.int64) + self.target_lengths)
        places = np.split(np.arange(len(self)), np.searchsorted(ends, self.tokens * np.arange(1, parts) / parts))
        return [self.at(part) for part in places if len(part)]

    def at(self, places: npt.NDArray[np.generic]) -> "GlobalBatch":
        """The samples at some of its places."""
        return GlobalBatch(
            iteration=self.iteration,
            sample_ids=self.sample_ids[places],
            input_lengths=self.input_lengths[places],
            target_lengths=self.target_lengths[places],
            labels=None if self.labels is None else self.labels[places],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Samples with their lengths in tokens, in positions and in padded positions: int64[samples] each.

    Attributes:
        labels: positions of each that count; None where all do.
        starts: where samples are cut: the first position of each entry, which may be a piece (`ways.pieces`).
        ranks: members of the team that runs each; then positions are a share's (`ways.teams`). None for whole samples.
    """

    ids: IntArray
    input_tokens: IntArray
    target_tokens: IntArray
    input_positions: IntArray
    target_positions: IntArray
    inputs: IntArray
    targets: IntArray
    labels: IntArray | None = None
    starts: IntArray | None = None
    ranks: IntArray | None = None

    def pieces_of(self, members: IntArray) -> tuple[Piece, ...]:
        """The positions of each of some entries, if one of them is a piece; else none."""
        if self.starts is None or self.team_of(members) > 1:
            return ()
        starts = self.starts[members]
        ends = starts + self.input_positions[members]
        whole = np.maximum(self.input_tokens[members] - 1, 1)
        if ((ends - starts) == whole).all():
            return ()
        return tuple(Piece(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))

    def team_of(self, members: IntArray) -> int:
        """Replicas that run some entries together, which are all alike in it."""
        return 1 if self.ranks is None or not len(members) else int(self.ranks[members[0]])

    @classmethod
    def of(cls, batch: GlobalBatch, family: ModelFamily, multiple: int = LENGTH_MULTIPLE) -> Self:
        """Round the batch's lengths up to padded positions, multiples of `multiple`.

        Raises:
            DataError: an input, or a decoder's target, is empty.
        """
        input_tokens = np.asarray(batch.input_lengths, np.int64)
        target_tokens = np.asarray(batch.target_lengths, np.int64)
        least = 1 if family.is_encoder_decoder else 0
        wrong = np.flatnonzero((input_tokens < 1) | (target_tokens < least))
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"sample {batch.sample_ids[row]} has {input_tokens[row]} input and {target_tokens[row]} target tokens;"
                f" a {family} sample needs at least 1 and {least}"
            )
        inputs = np.array([input_positions(family, n) for n in input_tokens.tolist()], np.int64)
        targets = np.array([target_positions(family, n) for n in target_tokens.tolist()], np.int64)
        labels = batch.labels  # none where all positions of all samples count
        return cls(
            ids=np.asarray(batch.sample_ids, np.int64),
            input_tokens=input_tokens,
            target_tokens=target_tokens,
            input_positions=inputs,
            target_positions=targets,
            inputs=round_up_all(inputs, multiple),
            targets=round_up_all(targets, multiple),
            labels=None if labels is None or (labels >= inputs).all() else labels.astype(np.int64),
        )


def round_up_all(positions: IntArray, multiple: int = LENGTH_MULTIPLE) -> IntArray:
    """Positions rounded up as lengths of micro-batches are."""
    return np.asarray(-(-positions // multiple) * multiple)


def fits_alone(problem: BatchProblem) -> BoolArray:
    """Whether each sample fits as a micro-batch of its own, alone in flight: bool[samples]."""
    fitting = [covered & (lack <= 0).all(axis=1) for covered, lack in _alone(problem)]
    return np.asarray(np.any(fitting, axis=0))


def _alone(problem: BatchProblem) -> list[tuple[BoolArray, IntArray]]:
    """Under each recompute mode, of every sample on its own: whether the cost model covers it, and bytes it lacks.

    The bytes are `[samples, stages]`.
    """
    memory_bytes = problem.memory_limit_bytes - problem.model_state_bytes
    shapes = np.stack([np.ones_like(problem.inputs), problem.inputs, problem.targets], axis=1)
    by_mode = []
    for mode in range(len(problem.modes)):
        costs, covered = problem.costs(shapes, np.full(len(shapes), mode, np.int64), problem.labels)
        by_mode.append((covered, costs.bytes_alone - memory_bytes))
    return by_mode


def explain_infeasible(samples: Samples, problem: BatchProblem) -> InfeasibleError:
    """Which sample fits no micro-batch even alone, and why: its stage, what it needs, what there is."""
    impossible = np.flatnonzero(~fits_alone(problem))
    if not len(impossible):
        return InfeasibleError(
            "every sample fits alone, but no schedule of their micro-batches fits the memory",
            hint="allow more recomputation, use more pipeline stages, or raise the memory limit",
        )
    row = int(impossible[0])
    where = f"sample {samples.ids[row]} of padded shape {problem.shape(impossible[:1])}"
    within = [lack[row] for covered, lack in _alone(problem) if covered[row]]
    if not within:
        return _explain_uncovered(where, problem, row)
    lack = min(within, key=lambda by_stage: int(by_stage.max()))
    stage = int(lack.argmax())
    there = int(problem.memory_limit_bytes - problem.model_state_bytes[stage])
    needed, available = in_mb(there + int(lack[stage]), there)
    return InfeasibleError(
        f"{where} needs {needed} of activations on stage {stage}, which has {available} left after its model state",
        hint="allow more recomputation, use more pipeline stages or tensor parallelism, or truncate long samples",
    )


def _explain_uncovered(where: str, problem: BatchProblem, row: int) -> InfeasibleError:
    """Why a sample has no costs: no layer's were measured, or a stage's are above the limit of every cost."""
    lengths = problem.inputs[row : row + 1], problem.targets[row : row + 1]
    one = np.ones(1, np.int64)
    longest = [max(int(getattr(tables, axis)[-1]) for tables in problem.modes) for axis in ("inputs", "targets")]
    if any(int(length[0]) > known for length, known in zip(lengths, longest, strict=True)):
        ends = " and ".join(str(known) for known in longest if known)
        return InfeasibleError(
            f"{where} lies outside the cost model's lengths, which end at {ends}",
            hint="truncate or skip long samples, or profile longer lengths",
        )
    if all((tables.at_sizes(tables.at_lengths(*lengths), one) == ABSENT).any() for tables in problem.modes):
        return InfeasibleError(
            f"{where} has no costs: at that length a layer was not measured, ran out of memory, or holds over 64 GB by"
            " computed costs",
            hint="cut samples into pieces, use more tensor parallelism or, on a CPU, no attention dropout; or truncate"
            " or skip long samples",
        )
    layers = problem.layout.layers_per_stage
    v = problem.native.uncovered_stage(
        size=1, input_length=int(lengths[0][0]), target_length=int(lengths[1][0]), mode=0
    )
    return InfeasibleError(
        f"{where} takes over {LARGEST_COST / 60e9:.0f} minutes or {LARGEST_COST / 1e12:.1f} TB on stage"
        f" {v % problem.layout.stages}, which has {layers[v]} layers",
        hint="use more pipeline stages or tensor parallelism, or truncate long samples",
    )
