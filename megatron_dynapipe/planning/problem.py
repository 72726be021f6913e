"""What the scheduler is given: the costs of one replica's micro-batches on every virtual stage, as integer arrays.

    micro-batches and shapes ──(cost model, layout)──► PipelineProblem ──(schedule)──► passes per stage

Virtual stage v of a pipeline of n ranks is chunk v // n of rank v % n; without interleaving v is the rank.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.plan.instructions import Pass

IntArray = npt.NDArray[np.int64]

PassOrder = tuple[tuple[Pass, ...], ...]
"""Per pipeline rank, its forward and backward passes in the order in which it runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProblem:
    """One replica's micro-batches on its pipeline. Arrays are int64, [micro-batches, virtual stages] unless said.

    Times are nanoseconds, memory is bytes. A send does not hold up its stage; a message arrives its transfer time
    after the pass that made it ends.
    """

    stages: int
    chunks: int
    forward_ns: IntArray
    backward_ns: IntArray
    stored_bytes: IntArray
    """Kept from a forward's end to its backward's end."""
    peak_bytes: IntArray
    """High-water mark of the forward above what others keep; at least `stored_bytes`. Of the backward too if
    `peak_covers_backward`: then it counts while either runs."""
    forward_transfer_ns: IntArray
    """From virtual stage v to v + 1; the last column is 0."""
    backward_transfer_ns: IntArray
    """From virtual stage v to v - 1; the first column is 0."""
    model_state_bytes: IntArray
    """[ranks]: held throughout."""
    memory_limit_bytes: int
    forward_only: bool = False
    peak_covers_backward: bool = False

    def __post_init__(self) -> None:
        shape = (self.micro_batches, self.stages * self.chunks)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                expected = (self.stages,) if field.name == "model_state_bytes" else shape
                assert value.dtype == np.int64 and value.shape == expected, (field.name, value.dtype, value.shape)
                assert (value >= 0).all(), field.name

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.forward_ns)

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages over all ranks."""
        return self.stages * self.chunks

    def take(self, order: npt.ArrayLike) -> Self:
        """The same problem over the micro-batches `order` names, in that order."""
        rows = np.asarray(order, dtype=np.int64)
        per_micro_batch: dict[str, Any] = {
            field.name: np.ascontiguousarray(value[rows])
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray) and field.name != "model_state_bytes"
        }
        return replace(self, **per_micro_batch)
