"""The planner's compiled core, built from csrc/."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]

CONSTANTS: dict[str, object]
"""Names that Python and the core both number."""

FEW_ROWS: int
"""Of a replica: a search of so few may end far from where its start promises."""

class BatchProblem:
    """One batch: its samples, costs and pipeline, and the cache of costs that all steps of planning share."""

    def __init__(
        self,
        *,
        inputs: _Ints,
        targets: _Ints,
        input_positions: _Ints,
        target_positions: _Ints,
        may_pad: bool,
        may_pack: bool,
        modes: Sequence[tuple[_Ints, ...]],
        packed: Sequence[tuple[_Ints, ...]],
        kinds: int,
        modules: _Ints,
        cuts: _Ints,
        every_quantity: bool,
        even_two: bool,
        chunks: int,
        model_state: _Ints,
        memory_limit: int,
        in_flight: _Ints,
        replicas: int,
        forward_only: bool,
        peak_covers_backward: bool,
        bytes_per_position: int,
        held_per_position: int,
        decoder_forward: _Flags,
        decoder_backward: _Flags,
        latency_ns: _Floats,
        gbps: _Floats,
        receive_ahead: int,
        ordered_starts: bool,
        chains: npt.NDArray[np.int32],
        extras: _Ints,
        labels: _Ints,
        labelled: _Ints,
        corrections: _Ints,
        precedents: Sequence[tuple[int, npt.NDArray[np.int64]]],
        division: int,
        row_multiple: int,
    ) -> None: ...
    def partition(
        self, *, orders: Sequence[_Ints], improve: bool
    ) -> tuple[list[int], list[tuple[list[int], list[int], int, int]]]:
        """The order chosen, and (sizes, modes, warm-up, total) per option, sizes empty where no partition fits."""

    def start(
        self, *, order: _Ints, partitions: Sequence[tuple[_Ints, _Ints]], most: int | None = None
    ) -> tuple[int, int] | None:
        """Time that a search starts with, and rows of a replica there; None where none may be less than `most`."""

    def search(
        self,
        *,
        order: _Ints,
        partitions: Sequence[tuple[_Ints, _Ints]],
        evaluations: int,
        seed: int,
        following: bool,
    ) -> list[tuple[list[int], list[int], list[int], list[bool], list[int], int]]:
        """Samples of all micro-batches, their sizes, modes, whether they are packed, passes of every stage, and ns.

        Per replica; empty where none fits. -1 evaluations take the default. `following`: from precedents alone, and
        empty where that is not as good as they are.
        """

    def estimate(self, *, order: _Ints) -> int | None:
        """What the batch may take in rows that suit it, in ns; None where some sample is not known in any."""

    def costs(
        self, *, sizes: _Ints, inputs: _Ints, targets: _Ints, modes: _Ints, labels: _Ints
    ) -> tuple[_Ints, list[bool]]:
        """`[9 * micro-batches, virtual stages]`, by kind of cost, and whether the cost model covers each."""

    def packed_costs(self, *, samples: _Ints, sizes: _Ints, modes: _Ints) -> tuple[_Ints, list[bool]]:
        """`costs` of packed rows: samples of all rows one after another, and how many each has."""

    def changed_costs(self, *, samples: _Ints, sizes: _Ints, modes: _Ints) -> tuple[_Ints, list[bool]]:
        """`packed_costs` as a search makes them, each from the row before; and whether each row fits alone."""

    def packed_modules(self, *, samples: _Ints, sizes: _Ints, modes: _Ints) -> tuple[_Ints, list[bool]]:
        """What their modules cost, `[rows, kinds * quantities]`, and whether the cost model covers each packed row."""

    def uncovered_stage(self, *, size: int, input_length: int, target_length: int, mode: int) -> int:
        """The first virtual stage on which a padded micro-batch has no costs, or -1."""

def simulate(
    costs: Sequence[_Ints],
    chunks: int,
    model_state: _Ints,
    forward_only: bool,
    order: _Ints,
    peak_covers_backward: bool = False,
    receive_ahead: int = -1,
    ordered_starts: bool = False,
) -> tuple[_Ints, _Ints, list[int], int, list[int]]:
    """(starts, ends, peak bytes, makespan, where it stalls the passes that each stage ran)."""

def list_schedule(
    costs: Sequence[_Ints],
    chunks: int,
    model_state: _Ints,
    memory_limit: int,
    forward_only: bool,
    depth: _Ints,
    rule: int,
    peak_covers_backward: bool = False,
    least_gap: int = -1,
    bound: int = ...,
    before: Sequence[int] = (),
) -> tuple[int, list[int]]:
    """(makespan, 1 per forward and 0 per backward of every stage).

    A stage runs second halves of backward passes where it would wait for at least `least_gap`; -1 keeps passes whole.
    From `bound` on the makespan does not matter. Passes that an earlier run of the micro-batches `before` has, too, are
    not run again, and left out.
    """

def reschedule(
    *,
    values: _Ints,
    cuts: _Ints,
    inputs: _Ints,
    targets: _Ints,
    chunks: int,
    model_state: _Ints,
    memory_limit: int,
    peak_covers_backward: bool,
    divided: bool,
    shares: _Floats,
    bytes_per_position: int,
    held_per_position: int,
    decoder_forward: _Flags,
    decoder_backward: _Flags,
    latency_ns: _Floats,
    gbps: _Floats,
) -> int:
    """The least makespan of micro-batches whose modules' costs are `[micro-batches, modules, quantities]`.

    Of some policies; longer by the first of the shares of memory within which one fits. 2^61 where none does.
    """

def fast_verify(
    lists: bytes, chunks: int, micro_batches: int, forward_only: bool, ordered_starts: bool = False
) -> tuple[bool, list[list[int]], list[list[int]], list[list[int]]]:
    """(whether the lists hold, steps of passes and of sends, elements of messages at each pass, per stage)."""

def orchestrate(
    *,
    units: int,
    forward: _Ints,
    backward: _Ints,
    stored: _Ints,
    boundary: _Floats,
    parameters: _Floats,
    state_bytes: _Ints,
    memory_limit: int,
    replicas: _Ints,
    reductions: _Floats,
    transfers: _Floats,
    first_choice: _Ints,
    choice_placement: _Ints,
    choice_state: _Ints,
    free_devices: _Ints,
    incumbent: int,
    beam: int,
    most: int,
) -> tuple[list[tuple[int, list[int], list[int]]], int]:
    """(bound, ends, placements) of plans that may take less than the incumbent, and the least bound dropped."""
