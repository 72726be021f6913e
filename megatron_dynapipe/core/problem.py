"""The values that planning hands to the native core: one batch, and one replica's micro-batches to be scheduled.

    samples, cost tables, layout ──► BatchProblem ──(partition, search, costs)──► micro-batches
    costs of a replica's micro-batches ──► ScheduleProblem ──(schedule)──► passes per stage

Virtual stage v of a pipeline of n stages is chunk v // n of stage v % n; without interleaving v is the stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.costs import HEAD, CostTables, Quantity
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.model import PipelineLayout
from megatron_dynapipe.core.native import agree, core
from megatron_dynapipe.core.network import GLOO_RULES, Links, TransferRules
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, BatchLayout, Shape, round_up

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_NONE = np.zeros(0, np.int64)

SplitBackward = Literal["off", "auto", "on"]
SPLIT_BACKWARD: dict[SplitBackward, int] = {"off": 0, "auto": 1, "on": 2}
"""The numbers that the native core gives them."""

_COST_FIELDS = (
    "forward_ns",
    "backward_ns",
    "stored_bytes",
    "peak_bytes",
    "forward_transfer_ns",
    "backward_transfer_ns",
    "weight_ns",
    "forward_message_bytes",
    "backward_message_bytes",
)
"""Arrays of costs of a `ScheduleProblem`, in the native core's order."""
_COSTS = len(_COST_FIELDS)

agree("Quantity", {quantity.name: quantity.value for quantity in Quantity})
agree("SplitBackward", SPLIT_BACKWARD)
agree("costs", list(_COST_FIELDS))


def native_rules(rules: TransferRules) -> dict[str, Any]:
    """The rules of transfers as the native core takes them."""
    ahead = -1 if rules.receive_ahead is None else rules.receive_ahead
    return {"receive_ahead": ahead, "ordered_starts": rules.ordered_starts}


def native_links(layout: PipelineLayout, links: Links, sent: int, held: int) -> dict[str, Any]:
    """Messages between stages as the native core takes them; `sent` and `held` are bytes of one position."""
    return {
        "bytes_per_position": sent,
        "held_per_position": held,
        "decoder_forward": np.array(layout.decoder_state_forward, np.bool_),
        "decoder_backward": np.array(layout.decoder_state_backward, np.bool_),
        "latency_ns": links.latency_ns.ravel(),
        "gbps": links.gbps.ravel(),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchProblem:
    """One batch to be planned. All steps share `native`, and with it one cache of costs.

    Attributes:
        inputs, targets: int64[samples], padded lengths; targets 0 for decoder-only models.
        input_positions, target_positions: int64[samples], without padding.
        batch_layouts: that micro-batches may be given.
        modes: modules' costs under each recompute mode that may be chosen, in order of preference on ties.
        layout: layers per virtual stage.
        model_state_bytes: int64[stages].
        memory_limit_bytes: memory of one device, model state included.
        in_flight: int64[options, stages], micro-batches that share a stage's memory; the order is partitioned for each.
        replicas: data-parallel replicas.
        links: what messages between stages take.
        bytes_per_position: bytes of one hidden state, as it is sent.
        held_per_position: bytes of it that a rank holds.
        forward_only: no backward runs and nothing is kept for it.
        peak_covers_backward: as in `ScheduleProblem`.
        transfers: when transfers are started, and what a start waits for.
        chains: int32[samples], where samples are cut: which one each is a piece of, in order, -1 for whole ones.
        piece_costs: int64[modes, samples, kinds, len(Quantity)], what pieces cost more, or shares where none is cut.
        split_backward: whether backward passes may be divided: where that is faster, or all that can be.
        labels: int64[samples], positions that count, over which alone some modules run (`PipelineLayout.over_labels`);
            None where all do.
        label_experts: whether experts are among those.
        every_quantity: whether the core keeps costs of modules with which no stage begins, for other layer splits.
        corrections, length_multiple, precedents: as in `PlannerSettings`.
    """

    inputs: IntArray
    targets: IntArray
    input_positions: IntArray
    target_positions: IntArray
    batch_layouts: tuple[BatchLayout, ...]
    modes: tuple[CostTables, ...]
    layout: PipelineLayout
    model_state_bytes: IntArray
    memory_limit_bytes: int
    in_flight: IntArray
    replicas: int
    links: Links
    bytes_per_position: int
    held_per_position: int
    forward_only: bool = False
    peak_covers_backward: bool = False
    transfers: TransferRules = GLOO_RULES
    chains: npt.NDArray[np.int32] | None = None
    piece_costs: IntArray | None = None
    split_backward: SplitBackward = "off"
    labels: IntArray | None = None
    label_experts: bool = False
    every_quantity: bool = False
    corrections: tuple[tuple[int, int, int], ...] = ()
    length_multiple: int = LENGTH_MULTIPLE
    precedents: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()

    @cached_property
    def native(self) -> core.BatchProblem:
        """The problem in the native core.

        Raises:
            PlanningError: lengths, costs or settings outside what 64-bit sums can hold; the message names which.
        """
        layout, width = self.layout, 3 + self.layout.virtual_stages
        kinds = self.modes[0].kinds if self.modes else ()
        modules = np.array([kinds.index(kind) for kind in layout.modules], np.int64)
        labels = labelled = np.zeros(0, np.int64)
        doubled = None
        if self.labels is not None:
            labels = np.ascontiguousarray(self.labels)
            labelled = np.array([-1, kinds.index(HEAD)])
            if len(layout.over_labels(self.modes[0].state.expert_kind, experts=self.label_experts)) > 1:
                doubled = kinds.index(layout.modules[-2])  # which gets a kind of its own
                modules[-2] = labelled[0] = len(kinds)
        try:
            return core.BatchProblem(
                inputs=np.ascontiguousarray(self.inputs),
                targets=np.ascontiguousarray(self.targets),
                input_positions=np.ascontiguousarray(self.input_positions),
                target_positions=np.ascontiguousarray(self.target_positions),
                may_pad=BatchLayout.PADDED in self.batch_layouts,
                may_pack=BatchLayout.PACKED in self.batch_layouts,
                modes=[_mode(tables, doubled) for tables in self.modes],
                packed=[_packed_mode(tables, doubled) for tables in self.modes],
                kinds=len(kinds) + (doubled is not None),
                modules=modules,
                labels=labels,
                labelled=labelled,
                corrections=np.array(self.corrections, np.int64).ravel(),
                cuts=layout.cuts,
                every_quantity=self.every_quantity,
                even_two=bool(layout.model.decoder or layout.model.layers_with_experts),
                chunks=layout.chunks,
                model_state=self.model_state_bytes,
                memory_limit=self.memory_limit_bytes,
                in_flight=self.in_flight,
                replicas=self.replicas,
                forward_only=self.forward_only,
                peak_covers_backward=self.peak_covers_backward,
                **native_links(layout, self.links, self.bytes_per_position, self.held_per_position),
                **native_rules(self.transfers),
                chains=_NONE.astype(np.int32) if self.chains is None else self.chains,
                extras=_NONE if self.piece_costs is None else _with(self.piece_costs, doubled, 2).ravel(),
                division=SPLIT_BACKWARD[self.split_backward],
                row_multiple=self.length_multiple,
                precedents=[
                    (over_estimate, np.array(rows, np.int64).reshape(-1, width))
                    for over_estimate, rows in self.precedents
                ],
            )
        except ValueError as error:
            raise PlanningError(f"the batch cannot be planned: {error}") from error

    def shape(self, members: IntArray, layout: BatchLayout = BatchLayout.PADDED) -> Shape:
        """The shape of a micro-batch of these samples; of a filler's, of none."""
        if not len(members):
            return Shape(1, self.length_multiple, self.length_multiple * int(self.targets.any()))
        if layout is BatchLayout.PACKED:
            both = (self.input_positions[members], self.target_positions[members])
            return Shape(1, *(round_up(int(positions.sum()), self.length_multiple) for positions in both))
        return Shape(len(members), int(self.inputs[members].max()), int(self.targets[members].max()))

    def costs_of(
        self, members: Sequence[IntArray], batch_layouts: Sequence[BatchLayout], modes: IntArray
    ) -> tuple["ScheduleProblem", BoolArray]:
        """`costs` of micro-batches of either layout, given their samples; fillers count as padded ones.

        Args:
            members: samples of each micro-batch.
            batch_layouts: each micro-batch's layout.
            modes: as for `costs`, or for every virtual stage: int64[micro-batches, virtual stages].
        """
        modes = np.broadcast_to(modes.reshape(len(members), -1), (len(members), self.layout.virtual_stages))
        rows = np.zeros((_COSTS, *modes.shape), np.int64)
        covered = np.ones(len(members), np.bool_)
        for mode in np.unique(modes).tolist():
            is_mode = modes == mode
            under = np.flatnonzero(is_mode.any(axis=1))
            rows_of = [(members[row], batch_layouts[row]) for row in under.tolist()]
            costs, known = self._costs_under(mode, *zip(*rows_of, strict=True))
            rows[:, under] = np.where(is_mode[under], costs, rows[:, under])
            covered[under] &= known
        return self._schedule_problem(rows), covered

    def _costs_under(
        self, mode: int, members: Sequence[IntArray], batch_layouts: Sequence[BatchLayout]
    ) -> tuple[IntArray, BoolArray]:
        """`costs_of` under one mode, `[_COSTS, micro-batches, virtual stages]`."""
        modes = np.full(len(members), mode, np.int64)
        rows_of = zip(members, batch_layouts, strict=True)
        packed = np.array([layout is BatchLayout.PACKED and len(samples) > 0 for samples, layout in rows_of], np.bool_)
        rows = np.zeros((_COSTS, len(members), self.layout.virtual_stages), np.int64)
        covered = np.zeros(len(members), np.bool_)
        if not packed.all():
            padded = [samples for samples, is_row in zip(members, packed, strict=True) if not is_row]
            shapes = [self.shape(samples) for samples in padded]
            labels = None if self.labels is None else np.array([self.labels[each].sum() for each in padded], np.int64)
            rows[:, ~packed], covered[~packed] = self._padded_costs(shapes, modes[~packed], labels)
        if packed.any():
            chosen = [samples for samples, is_row in zip(members, packed, strict=True) if is_row]
            sizes = np.array([len(samples) for samples in chosen], np.int64)
            costs, covered[packed] = self.native.packed_costs(
                samples=np.concatenate(chosen), sizes=sizes, modes=modes[packed]
            )
            rows[:, packed] = costs.reshape(_COSTS, len(chosen), -1)
        return rows, covered

    def costs(
        self, shapes: Sequence[Shape] | IntArray, modes: IntArray, labels: IntArray | None = None
    ) -> tuple["ScheduleProblem", BoolArray]:
        """Costs of micro-batches on every virtual stage, and whether the cost model covers each: bool[micro-batches].

        Args:
            shapes: each micro-batch's shape; `[micro-batches, 3]`.
            modes: int64[micro-batches], its recompute mode as an index of `modes`.
            labels: int64[micro-batches], positions that count; None for all.
        """
        rows, covered = self._padded_costs(shapes, modes, labels)
        return self._schedule_problem(rows), covered

    def _padded_costs(
        self, shapes: Sequence[Shape] | IntArray, modes: IntArray, labels: IntArray | None
    ) -> tuple[IntArray, BoolArray]:
        sizes, inputs, targets = (np.ascontiguousarray(column) for column in np.asarray(shapes, np.int64).T)
        labels = sizes * inputs if labels is None else labels
        rows, covered = self.native.costs(sizes=sizes, inputs=inputs, targets=targets, modes=modes, labels=labels)
        return rows.reshape(_COSTS, len(sizes), -1), np.array(covered, np.bool_)

    def _schedule_problem(self, rows: IntArray) -> "ScheduleProblem":
        """The rows of the native core, `[_COSTS, micro-batches, virtual stages]`, as a problem."""
        arrays: dict[str, IntArray] = dict(zip(_COST_FIELDS, rows, strict=True))
        return ScheduleProblem(
            stages=self.layout.stages,
            chunks=self.layout.chunks,
            **arrays,
            model_state_bytes=self.model_state_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
            forward_only=self.forward_only,
            peak_covers_backward=self.peak_covers_backward,
            transfers=self.transfers,
        )


def _with(values: IntArray, doubled: int | None, axis: int = 0) -> IntArray:
    """Costs by kind, along an axis, with one of the kinds again at the end."""
    added = [] if doubled is None else [values.take([doubled], axis)]
    return np.concatenate([values, *added], axis)


def _mode(tables: CostTables, doubled: int | None) -> tuple[IntArray, ...]:
    separate = tables.values if tables.separate is None else tables.separate
    return (tables.sizes, tables.inputs, tables.targets, _with(tables.values, doubled), _with(separate, doubled))


def _packed_mode(tables: CostTables, doubled: int | None) -> tuple[IntArray, ...]:
    """Costs of packed rows; empty where they are derived."""
    packed = tables.packed
    if packed is None:
        return _NONE, _NONE, _NONE.reshape(0, 0, 0, 0), _NONE, _NONE, _NONE.reshape(0, 0, 0, 0)
    linear, attention = _with(packed.linear, doubled), _with(packed.attention, doubled)
    return packed.row_inputs, packed.row_targets, linear, packed.inputs, packed.targets, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleProblem:
    """One replica's micro-batches on its pipeline. Arrays are int64, [micro-batches, virtual stages] unless said.

    Times are nanoseconds, memory is bytes. Under the default rules a send does not hold up its stage, and a message
    arrives its transfer time after the pass that made it ends.
    """

    stages: int
    chunks: int
    forward_ns: IntArray
    backward_ns: IntArray
    stored_bytes: IntArray
    """Kept from a forward's end to its backward's end."""
    peak_bytes: IntArray
    """High-water mark above what others keep while a forward runs, with `peak_covers_backward` a backward, too."""
    weight_ns: IntArray
    """The part of the backward that may run later, as its second half; 0 where it cannot be divided."""
    forward_transfer_ns: IntArray
    """From virtual stage v to v + 1; the last column is 0."""
    backward_transfer_ns: IntArray
    """From virtual stage v to v - 1; the first column is 0."""
    forward_message_bytes: IntArray
    """From virtual stage v to v + 1; the last column is 0."""
    backward_message_bytes: IntArray
    """From virtual stage v to v - 1; the first column is 0."""
    model_state_bytes: IntArray
    """[stages]: held throughout."""
    memory_limit_bytes: int
    forward_only: bool = False
    peak_covers_backward: bool = False
    transfers: TransferRules = GLOO_RULES

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
        """Number of virtual stages of the whole pipeline."""
        return self.stages * self.chunks

    @property
    def cost_arrays(self) -> list[IntArray]:
        """The costs as the native core takes them."""
        return [getattr(self, name) for name in _COST_FIELDS]

    @property
    def stage_times_ns(self) -> IntArray:
        """Forward and backward time of each micro-batch per stage, over its chunks: `[micro-batches, stages]`."""
        both = self.forward_ns if self.forward_only else self.forward_ns + self.backward_ns
        return np.asarray(both.reshape(-1, self.chunks, self.stages).sum(axis=1))

    @property
    def bytes_alone(self) -> IntArray:
        """Bytes of each micro-batch alone in flight, messages included, model state not: `[micro-batches, stages]`."""
        messages = np.pad(self.forward_message_bytes[:, :-1], ((0, 0), (1, 0)))
        if not self.forward_only:
            messages = messages + np.pad(self.backward_message_bytes[:, 1:], ((0, 0), (0, 1)))
        by_chunk = (-1, self.chunks, self.stages)
        stored, peak, beside = (array.reshape(by_chunk) for array in (self.stored_bytes, self.peak_bytes, messages))
        return np.asarray(stored.sum(axis=1) + (peak - stored + beside).max(axis=1))

    def take(self, order: npt.ArrayLike) -> Self:
        """The same problem over the micro-batches `order` names, in that order."""
        rows = np.asarray(order, dtype=np.int64)
        per_micro_batch: dict[str, Any] = {
            field.name: np.ascontiguousarray(value[rows])
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), np.ndarray) and field.name != "model_state_bytes"
        }
        return replace(self, **per_micro_batch)
