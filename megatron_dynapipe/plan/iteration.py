"""Plans as values: micro-batches, one stage's instruction list, a whole iteration, and what one rank is sent.

    IterationPlan ─┬─ ReplicaPlan 0 ─┬─ MicroBatch 0, 1, …
                   │                 └─ StagePlan 0, 1, …      (one per pipeline rank)
                   └─ ReplicaPlan 1 …

A `StageEntry` (`plan.entry`) is the share of one (replica, stage): the replica's micro-batches and that stage's list.
"""

from typing import NamedTuple

import msgspec

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.units import BatchLayout, ModelFamily, Recompute, Shape, input_positions


class Piece(NamedTuple):
    """Positions of a decoder-only sample that was cut along its sequence: from `start`, up to `end`."""

    start: int
    end: int


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Samples that run together: a row each, padded to the longest, or packed one after another in a single row.

    Lengths are in tokens after truncation, so that every stage can build its masks without reading the data:
    decoder-only samples have their whole sequence in `input_lengths` and 0 in `target_lengths`. Recompute modes and
    bytes are per virtual stage in model order: what its forward keeps until its backward, and the high-water mark of
    its forward (of its backward too, if the plan's `peak_covers_backward`) above what others keep. Where the samples of
    a packed row begin follows from their lengths, see `plan.packing`.

    One without samples fills a position of replicas that run in step (`plan.in_step`): it has one row, and trains on
    nothing.

    Where a sample is cut, `pieces` says which positions each entry of a packed row has, those of whole samples too; it
    is empty where none is cut. Lengths are still those of the whole samples. See `plan.pieces`.

    Where the last MLP and the head run positions with labels alone, `labels` says how many each entry has; it is empty
    where all positions run.
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
        if len({len(self.recompute), len(self.stored_bytes), len(self.peak_bytes)}) > 1:
            raise PlanError(
                "expected recompute modes, stored and peak bytes for the same virtual stages, got "
                f"{len(self.recompute)}, {len(self.stored_bytes)} and {len(self.peak_bytes)}"
            )

    def positions(self, family: ModelFamily) -> tuple[int, ...]:
        """Input positions of every sample, or of its piece."""
        if self.pieces:
            return tuple(end - start for start, end in self.pieces)
        return tuple(input_positions(family, tokens) for tokens in self.input_lengths)

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
        """Samples that begin here: all but those of which an earlier piece is elsewhere."""
        if not self.pieces:
            return self.sample_ids
        pieces = zip(self.sample_ids, self.pieces, strict=True)
        return tuple(sample for sample, piece in pieces if piece.start == 0)

    @property
    def cut(self) -> int:
        """Samples that begin here and go on in another micro-batch."""
        lengths = zip(self.pieces, self.input_lengths, strict=False)
        return sum(start == 0 and end < input_positions(ModelFamily.GPT, tokens) for (start, end), tokens in lengths)

    @property
    def real_tokens(self) -> int:
        """Tokens of its samples; a piece has as many as positions, and the first one more, for the token before."""
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
    layouts: tuple[BatchLayout, ...] = (BatchLayout.PADDED,)
    """Layouts that the run's settings allow its micro-batches."""
    replicas: tuple[ReplicaPlan, ...]
    in_step: int = 1
    """Neighbouring replicas that run in step: passes of one kind in one order. See `plan.in_step`."""

    @property
    def shapes(self) -> frozenset[tuple[BatchLayout, Shape]]:
        """The distinct shapes of its micro-batches; kernels are picked for each."""
        return frozenset((mb.layout, mb.shape) for replica in self.replicas for mb in replica.micro_batches)

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
            left_out=sum(sum(mb.positions(self.family)) - sum(mb.labels) for mb in batches if mb.labels),
        )
