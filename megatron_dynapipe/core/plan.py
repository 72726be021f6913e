"""Plans as values: micro-batches, one stage's instruction list, a whole iteration, and what one rank is sent.

    IterationPlan ─┬─ ReplicaPlan 0 ─┬─ MicroBatch 0, 1, …
                   │                 └─ StagePlan 0, 1, …      (one per pipeline rank)
                   └─ ReplicaPlan 1 …

A `StageEntry` (`store.entry`) is the share of one (replica, stage): the replica's micro-batches and that stage's list.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import EFFECTS, Instruction, Pass, Work
from megatron_dynapipe.core.units import (
    LENGTH_MULTIPLE,
    BatchLayout,
    ModelFamily,
    Recompute,
    Shape,
    input_positions,
    round_up,
    sequence_positions,
    target_positions,
)

FORWARD = "forward"
BACKWARD = "backward"
TRANSFER = "transfer"
OTHER = "other"
"""Kinds of instructions, for where time went."""
_KINDS = {
    Work.FORWARD: FORWARD,
    Work.BACKWARD: BACKWARD,
    Work.WEIGHTS: BACKWARD,
    Work.TRANSFER: TRANSFER,
    Work.WAIT: TRANSFER,
}
MUCH_IDLE = 0.25
"""Idle share from which on commands and run summaries add a hint at what lowers it."""


class Event(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One instruction's time on one stage, in nanoseconds from the start of the iteration."""

    instruction: Instruction
    start_ns: int
    end_ns: int


Timeline = tuple[tuple[Event, ...], ...]
"""Events per pipeline stage, in the order in which they ran."""


def idle_share(timeline: Timeline, span_ns: int) -> float:
    """Share of all stages' time, `span_ns` each, in which no pass ran; 0 without stages or time."""
    whole = span_ns * len(timeline)
    passes = (event for events in timeline for event in events if isinstance(event.instruction, Pass))
    return 1 - sum(event.end_ns - event.start_ns for event in passes) / whole if whole else 0.0


def kind_of(instruction: Instruction) -> str:
    """The kind of work that an instruction's time counts to."""
    return _KINDS.get(EFFECTS[type(instruction)].work, OTHER)


def time_by_kind(events: Sequence[Event]) -> Mapping[str, int]:
    """Nanoseconds of a stage's instructions, by kind; 0 for a kind that does not occur."""
    spent: dict[str, int] = defaultdict(int)
    for event in events:
        spent[kind_of(event.instruction)] += event.end_ns - event.start_ns
    return spent


class Piece(NamedTuple):
    """Positions of a decoder-only sample that was cut along its sequence: from `start`, up to `end`."""

    start: int
    end: int


Share = tuple[int, int]
"""(ranks, place): of a sample's 2 · ranks chunks, the replica at `place` has number `place` and the one as far from the
end, so that all have as much to attend to. (1, 0) is all of it."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Samples that run together: a row each, padded to the longest, or packed one after another in a single row.

    Lengths are in tokens after truncation, so that every stage can build its masks without reading the data:
    decoder-only samples have their whole sequence in `input_lengths` and 0 in `target_lengths`. Recompute modes and
    bytes are per virtual stage in model order: what its forward keeps until its backward, and the high-water mark of
    its forward (of its backward too, if the plan's `peak_covers_backward`) above what others keep. Lengths say where
    each sample of a packed row begins.

    One without samples fills a position of replicas that run in step (`ways.step_rule`): it has one row, and trains on
    nothing.

    If a sample is cut, `pieces` says which positions each entry of a packed row has, whole samples included; it is
    empty if none is cut. Lengths are still the whole samples'. See `ways.chains`.

    If the last MLP and the head run positions with labels alone, `labels` says how many each entry has; it is empty if
    all positions run.

    If a team of replicas runs it together, `share` says this one's part of every sample, whose shape it has. See
    `ways.teams_rule`.
    """

    sample_ids: tuple[int, ...]
    input_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]
    shape: Shape
    layout: BatchLayout = BatchLayout.PADDED
    recompute: tuple[Recompute, ...]
    stored_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    labels: tuple[int, ...] = ()
    share: Share = (1, 0)

    def __post_init__(self) -> None:
        counts = (len(self.sample_ids), len(self.input_lengths), len(self.target_lengths))
        packed = self.layout is BatchLayout.PACKED
        if packed and self.shape.size != 1:
            raise PlanError(
                f"expected a packed micro-batch of 1 row, got shape {self.shape} with {self.shape.size} rows"
            )
        samples = counts[0] if packed or (self.is_filler and self.shape.size == 1) else self.shape.size
        if set(counts) != {samples} or self.shape.size < 1:
            raise PlanError(
                f"expected {max(samples, 1)} samples with their lengths in a {self.layout} micro-batch of shape "
                f"{self.shape}, got {counts[0]} sample ids, {counts[1]} input lengths, {counts[2]} target lengths"
            )
        if self.pieces and (not packed or len(self.pieces) != samples):
            raise PlanError(
                f"expected pieces in a packed micro-batch alone, one for each of its {samples} samples, got "
                f"{len(self.pieces)} in a {self.layout} one"
            )
        if self.labels and len(self.labels) != samples:
            raise PlanError(f"expected labels of each of {samples} samples or of none, got {len(self.labels)}")
        ranks, place = self.share
        if not 0 <= place < ranks or (ranks > 1 and self.pieces):
            raise PlanError(f"expected a place among the ranks that share whole samples, got {place} of {ranks}")
        if len({len(self.recompute), len(self.stored_bytes), len(self.peak_bytes)}) > 1:
            raise PlanError(
                "expected recompute modes, stored and peak bytes for the same virtual stages, got "
                f"{len(self.recompute)}, {len(self.stored_bytes)} and {len(self.peak_bytes)}"
            )

    def positions(self, family: ModelFamily) -> tuple[int, ...]:
        """Input positions of every sample, or of its piece or share; a share's chunks are filled up."""
        if self.pieces:
            return tuple(end - start for start, end in self.pieces)
        whole = tuple(input_positions(family, tokens) for tokens in self.input_lengths)
        ranks, _ = self.share
        return whole if ranks == 1 else tuple(2 * -(-positions // (2 * ranks)) for positions in whole)

    @property
    def modes(self) -> Recompute | list[Recompute]:
        """The recompute mode of all virtual stages, or where they differ a list of theirs."""
        return self.recompute[0] if len(set(self.recompute)) == 1 else list(self.recompute)

    @property
    def is_filler(self) -> bool:
        """Whether it has no samples."""
        return not self.sample_ids

    @property
    def begun_ids(self) -> tuple[int, ...]:
        """Samples that begin here: all except the ones whose earlier pieces, or first shares, are elsewhere."""
        if self.share[1]:
            return ()
        if not self.pieces:
            return self.sample_ids
        pieces = zip(self.sample_ids, self.pieces, strict=True)
        return tuple(sample for sample, piece in pieces if piece.start == 0)

    @property
    def cut(self) -> int:
        """Samples that begin here and go on in another micro-batch."""
        lengths = zip(self.pieces, self.input_lengths, strict=False)
        return sum(start == 0 and end < sequence_positions(tokens) for (start, end), tokens in lengths)

    @property
    def real_tokens(self) -> int:
        """Tokens of its samples; a piece has as many as positions, and the first one more, for the token before."""
        if self.share[1]:
            return 0
        if self.pieces:
            return sum(end - start + (start == 0) for start, end in self.pieces)
        return sum(self.input_lengths) + sum(self.target_lengths)


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One pipeline rank's instructions of one iteration, and when the planner expects each pass to run."""

    stage: int
    instructions: tuple[Instruction, ...]
    predicted: tuple[Event, ...]


class ReplicaPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One data-parallel replica's share of an iteration; it may hold no micro-batch at all."""

    micro_batches: tuple[MicroBatch, ...]
    stages: tuple[StagePlan, ...]
    predicted_ns: int

    @property
    def team(self) -> int:
        """Replicas that run all its micro-batches together; 1 where some are its own."""
        return min((mb.share[0] for mb in self.micro_batches), default=1)


class Totals(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """An iteration over all its replicas, in numbers that every rank may want to log."""

    samples: int
    real_tokens: int
    """Tokens of all samples, without padding."""
    padded_positions: int
    """Positions of all micro-batches, with padding and what fills packed rows up."""
    micro_batches: tuple[int, ...]
    """Micro-batches per replica."""
    predicted_ns: int
    """Predicted time of the slowest replica: forward, backward and transfers."""
    cut_samples: int = 0
    """Samples that were cut into pieces along their sequence."""
    left_out: int = 0
    """Positions without a label, which the last MLP and the head leave out."""

    @property
    def padding_efficiency(self) -> float:
        """Tokens over positions; at most 1, since n tokens of a decoder-only sample take n - 1 positions."""
        return min(self.real_tokens / max(self.padded_positions, 1), 1.0)


class IterationPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Everything one iteration does: a pure function of (lengths, settings, seed)."""

    iteration: int
    family: ModelFamily
    forward_only: bool
    settings_digest: str
    pipeline_stages: int
    chunks: int
    """Virtual stages per pipeline rank; virtual stage v is chunk v // stages of rank v % stages."""
    memory_limit_bytes: int
    model_state_bytes: tuple[int, ...]
    """Parameters, gradients and optimizer state per pipeline rank."""
    peak_covers_backward: bool
    """Whether a micro-batch's peak counts while its backward runs, too."""
    batch_layouts: tuple[BatchLayout, ...] = msgspec.field(default=(BatchLayout.PADDED,), name="layouts")
    """Layouts that the run's settings allow its micro-batches."""
    replicas: tuple[ReplicaPlan, ...]
    in_step: int = 1
    """Neighbouring replicas that run in step: passes of one kind in one order. See `ways.step_rule`."""

    @property
    def shapes(self) -> frozenset[tuple[BatchLayout, Shape]]:
        """The distinct shapes of its micro-batches; kernels are picked for each."""
        return frozenset((mb.layout, mb.shape) for replica in self.replicas for mb in replica.micro_batches)

    @property
    def teams(self) -> tuple[int, ...]:
        """Replicas that run one list together, in order, single ones too; their sum is the number of replicas."""
        sizes: list[int] = []
        while sum(sizes) < len(self.replicas):
            sizes.append(self.replicas[sum(sizes)].team)
        return tuple(sizes)

    @property
    def totals(self) -> Totals:
        """Sums over the replicas."""
        batches = [mb for replica in self.replicas for mb in replica.micro_batches]
        return Totals(
            samples=sum(len(mb.begun_ids) for mb in batches),
            real_tokens=sum(mb.real_tokens for mb in batches),
            padded_positions=sum(mb.shape.positions for mb in batches),
            micro_batches=tuple(len(replica.micro_batches) for replica in self.replicas),
            predicted_ns=max((replica.predicted_ns for replica in self.replicas), default=0),
            cut_samples=sum(mb.cut for mb in batches),
            left_out=sum(sum(mb.positions(self.family)) - sum(mb.labels) for mb in batches if mb.labels)
            + sum(sum(mb.labels) for mb in batches if mb.share[1]),
        )


class RowOffsets(NamedTuple):
    """First position of every sample of a packed row, and the end of the last: one more than there are samples."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """All 0 for decoder-only models."""


def row_offsets(family: ModelFamily, micro_batch: MicroBatch) -> RowOffsets:
    """Where the samples of a packed micro-batch begin in its input and its target row."""
    targets = (target_positions(family, tokens) for tokens in micro_batch.target_lengths)
    return RowOffsets(
        inputs=tuple(accumulate(micro_batch.positions(family), initial=0)),
        targets=tuple(accumulate(targets, initial=0)),
    )


def least_shape(family: ModelFamily, micro_batch: MicroBatch) -> Shape:
    """The least shape of a packed micro-batch's row: `[1, inputs, targets]`."""
    offsets = row_offsets(family, micro_batch)
    return Shape(1, round_up(offsets.inputs[-1]), round_up(offsets.targets[-1]))


def holds_row(family: ModelFamily, micro_batch: MicroBatch) -> bool:
    """Whether a packed micro-batch's shape has room for its samples; rows may be longer than their samples need."""
    least = least_shape(family, micro_batch)
    shape = micro_batch.shape
    lengths = zip(least[1:], shape[1:], strict=True)
    fits = all(needed <= room and room % LENGTH_MULTIPLE == 0 for needed, room in lengths)
    return fits and (shape.target_length == 0) == (least.target_length == 0)
