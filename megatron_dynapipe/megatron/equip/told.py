"""What modules are told of a micro-batch apart from the model's call.

Host, block and layers see one sequence of batch size 1 where samples are packed: Megatron's own way to name samples in
a row (`PackedSeqParams`) changes how its attention shapes, rotates and masks, differently for each kind of layer. So a
row goes past them, to the few modules that look at more than one position: core attention, rotations, routers, heads.
They are told before every pass, backward passes included, in which layers may be computed again.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_dynapipe.megatron.models.packed_rows import PackedRow
from megatron_dynapipe.megatron.models.shared_keys import Teams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Told:
    """One micro-batch of b rows of s positions.

    Attributes:
        row: where samples lie in a packed row; None for padded rows.
        rows: int64[n], position · b + row of each position with a label; None for all positions.
        labels, counts: [1, n], labels of `rows`, and 1 where one counts: for a host whose step function has all
            positions' labels. None where the step function gives labels of `rows` itself.
        shape: (b, s), with `labels`.
        samples: int64[s, b], the sample of each position, `sample_count` for padding; None where no router asks.
        sample_count: samples.
    """

    row: PackedRow | None = None
    rows: Tensor | None = None
    labels: Tensor | None = None
    counts: Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    samples: Tensor | None = None
    sample_count: int = 0


NOTHING = Told()
"""Padded rows with labels everywhere, as any model takes them."""


class Channel:
    """Holds what a rank's modules are told.

    Attributes:
        told: what is told of the micro-batch whose pass runs.
        teams: the groups by which rows may be shared.
    """

    def __init__(self) -> None:
        self.told = NOTHING
        self.teams: Teams = {}
