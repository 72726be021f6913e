"""Where the samples of a micro-batch stand among its positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.iteration import MicroBatch
from megatron_dynapipe.plan.packing import holds_row, least_shape, row_offsets
from megatron_dynapipe.plan.pieces import cut_entries
from megatron_dynapipe.units import BatchLayout, ModelFamily, input_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRows:
    """Where each sample begins among a micro-batch's positions, counted through all its rows."""

    input_starts: Sequence[int]
    target_starts: Sequence[int]
    input_segments: RowSegments | None = None
    target_segments: RowSegments | None = None

    @classmethod
    def of(cls, index: int, family: ModelFamily, plan: MicroBatch) -> Self:
        """A row for each sample, or the offsets in a packed row; raises PlanError if those do not cover it."""
        size, input_length, target_length = plan.shape
        if plan.layout is BatchLayout.PADDED:
            inputs, targets = ([row * length for row in range(size)] for length in (input_length, target_length))
            return cls(input_starts=inputs, target_starts=targets)
        if not holds_row(family, plan):
            expected = least_shape(family, plan)
            raise PlanError(
                f"micro-batch {index}: expected a packed row of shape {expected} or longer for its "
                f"{len(plan.sample_ids)} samples, got {plan.shape}"
            )
        offsets = row_offsets(family, plan)
        cuts = {
            at: CutSegment(
                plan.sample_ids[at], piece.start, piece.end < input_positions(family, plan.input_lengths[at])
            )
            for at, piece in cut_entries(plan)
        }
        return cls(
            input_starts=offsets.inputs[:-1],
            target_starts=offsets.targets[:-1],
            input_segments=RowSegments.of(offsets.inputs, input_length, cuts),
            target_segments=RowSegments.of(offsets.targets, target_length) if target_length else None,
        )


def put(array: npt.NDArray[Any] | None, first: int, values: npt.ArrayLike) -> None:
    """Write values into an array's rows from a position on, where the stage has the array."""
    if array is not None:
        written = np.asarray(values)
        array.reshape(-1)[first : first + len(written)] = written


def check_fits(index: int, plan: MicroBatch, what: str, positions: npt.NDArray[np.int32], length: int) -> None:
    """Every sample's real positions lie within the padded shape, and there is at least one."""
    if int(positions.max()) > length or int(positions.min()) < 1:
        at = int(np.argmax((positions > length) | (positions < 1)))
        raise PlanError(
            f"micro-batch {index} of shape {plan.shape}: expected 1…{length} {what} positions,"
            f" sample {plan.sample_ids[at]} needs {positions[at]}"
        )
