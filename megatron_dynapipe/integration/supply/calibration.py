"""Calibration while training: this rank's measured passes, published for the planners to correct the cost model."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dynapipe.cost.correct import PassSample
from megatron_dynapipe.errors import StoreTimeoutError
from megatron_dynapipe.plan.instructions import Backward, Forward, Load, Pass, Payload, SendStart
from megatron_dynapipe.plan.iteration import MicroBatch, StageEntry
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.service.client import Republisher
from megatron_dynapipe.service.recalibration import Measurements, Recalibration
from megatron_dynapipe.store import PlanKeys, PlanStore
from megatron_dynapipe.units import BatchLayout, ModelFamily, input_positions, target_positions

_DEADLINE_S = 0.1
"""For a version that was made long ago."""
_LAST_DEADLINE_S = 1.0


class PassPublisher:
    """Collects measured passes, and publishes them when the rule says that a version is fitted to them.

    Args:
        rule: when versions are made.
        store: where passes go.
        keys: names in it.
        rank: of this process.
        republisher: publishes them again where the store is lost.
        room: bytes of the device that tensors can have, by the allocator's peaks so far; asked once a version.
    """

    def __init__(
        self,
        rule: Recalibration,
        store: PlanStore,
        keys: PlanKeys,
        *,
        rank: int,
        republisher: Republisher,
        room: Callable[[MemoryCounts], int | None] = lambda _: None,
    ) -> None:
        self._rule = rule
        self._store = store
        self._keys = keys
        self._rank = rank
        self._republisher = republisher
        self._room = room
        self._peaks: MemoryCounts | None = None
        self._passes: list[PassSample] = []
        self._version = 1

    def version(self, iteration: int) -> int:
        """The version of the cost model that an iteration was planned with."""
        return self._rule.version(iteration)

    def add(self, entry: StageEntry, events: Sequence[Event], memory: MemoryCounts | None = None) -> None:
        """Take the passes of an iteration that has run; the first of a run pays for starting up and is left out.

        Args:
            entry: what was to be run.
            events: when it ran.
            memory: the allocator's peaks; None where it cannot tell fragments.
        """
        if memory is not None:
            self._peaks = memory if self._peaks is None else self._peaks.with_peaks_of(memory)
        if entry.iteration > self._rule.first_iteration:
            self._passes += measured_passes(entry, events)
        if entry.iteration + 1 == self._rule.measured_until(self._version):
            self._publish()

    def _publish(self) -> None:
        room = None if self._peaks is None else self._room(self._peaks)
        measured = Measurements(passes=tuple(self._passes), tensor_room_bytes=room)
        key, value = self._keys.passes(self._version, self._rank), measured.encode()
        self._store.put(key, value)
        self._republisher.keep(key, value)
        # Plans from the iteration in training on may be made again, none before.
        for old in range(1, self._rule.version(self._rule.measured_until(self._version) - 1)):
            self._republisher.forget(self._keys.passes(old, self._rank))
        self._passes = []
        self._version += 1

    def save_versions(self, folder: Path, last_iteration: int) -> None:
        """Write every version that planned an iteration of this run beside its records, for planning again.

        A version that the store no longer has is passed over; the last may not have been made before training ended.
        """
        last = self.version(last_iteration)
        for version in range(1, last + 1):
            what = f"version {version} of the cost model"
            timeout_s = _LAST_DEADLINE_S if version == last else _DEADLINE_S
            try:
                data = self._store.wait_any([self._keys.costs(version)], timeout_s=timeout_s, what=what)[1]
            except StoreTimeoutError:
                continue
            (folder / f"cost-model-{version}.json").write_bytes(data)


def measured_passes(entry: StageEntry, events: Sequence[Event]) -> list[PassSample]:
    """One sample per micro-batch and chunk that ran on this rank.

    A pass is charged with what its stage does for it besides: loading before a forward, issuing the sends after.
    """
    times: dict[tuple[int, int], dict[type, int]] = {}
    kind: type[Forward | Backward]
    for event in events:
        instruction = event.instruction
        if isinstance(instruction, Load):
            of, kind = (instruction.micro_batch, 0), Forward
        elif isinstance(instruction, Pass):  # the halves of a backward pass count together
            of, kind = (instruction.micro_batch, instruction.chunk), Backward
            if isinstance(instruction, Forward):
                kind = Forward
        elif isinstance(instruction, SendStart):
            of = instruction.micro_batch, instruction.chunk
            kind = Forward if instruction.payload is Payload.ACTIVATION else Backward
        else:
            continue
        passes = times.setdefault(of, {})
        passes[kind] = passes.get(kind, 0) + event.end_ns - event.start_ns
    return [
        PassSample(
            stage=chunk * entry.pipeline_stages + entry.stage_plan.stage,
            shape=entry.micro_batches[index].shape,
            recompute=entry.micro_batches[index].recompute,
            forward_ns=passes.get(Forward, 0),
            backward_ns=passes.get(Backward, 0),
            **_row(entry.micro_batches[index], entry.family),
        )
        for (index, chunk), passes in times.items()
        if not entry.micro_batches[index].is_filler
    ]


def _row(micro_batch: MicroBatch, family: ModelFamily) -> dict[str, tuple[int, ...]]:
    """Positions of the samples of a packed row, and those before its pieces."""
    if micro_batch.layout is BatchLayout.PADDED:
        return {}
    inputs = tuple(input_positions(family, tokens) for tokens in micro_batch.input_lengths)
    if micro_batch.pieces:
        return {
            "inputs": tuple(piece.end - piece.start for piece in micro_batch.pieces),
            "targets": (0,) * len(inputs),
            "before": tuple(piece.start for piece in micro_batch.pieces),
        }
    return {
        "inputs": inputs,
        "targets": tuple(target_positions(family, tokens) for tokens in micro_batch.target_lengths),
    }
