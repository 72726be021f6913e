"""The record of one iteration's samples, which sampling hands to planning."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
