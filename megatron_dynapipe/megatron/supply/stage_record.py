"""One stage's part of an iteration as a record: where its time and memory went, and the losses of the last stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dynapipe.core.plan import BACKWARD, FORWARD, OTHER, TRANSFER, Event, time_by_kind
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.report.records import EvaluationRecord, StageRecord
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.store.entry import activation_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """What follows an iteration's list before the next begins, in nanoseconds on the clock of the list's events.

    Attributes:
        list_ns: the end of the list's last instruction.
        reduced_ns: gradients were final.
        stepped_ns: the optimizer had stepped.
    """

    list_ns: int
    reduced_ns: int
    stepped_ns: int


def stage_record(
    item: PlannedIteration,
    events: Sequence[Event],
    losses: dict[str, tuple[float, float]],
    memory: MemoryCounts | None,
    *,
    previous: Between | None,
) -> StageRecord:
    """The record of one stage's iteration, whose instructions ran at `events`.

    `losses` are (sum over tokens, tokens) by name, on the last stage. `previous` is when the previous iteration's list
    and what followed it ended; None before the first.
    """
    spent = time_by_kind(events)
    waited = round(item.waited_seconds * 1e9)
    between = 0
    reduction = 0
    optimizer = 0
    if events and previous is not None:
        between = max(events[0].start_ns - previous.list_ns - waited, 0)
        reduction = min(max(previous.reduced_ns - previous.list_ns, 0), between)
        optimizer = min(max(previous.stepped_ns - previous.reduced_ns, 0), between - reduction)
    return StageRecord(
        iteration=item.entry.iteration,
        replica=item.entry.replica,
        stage=item.entry.stage_plan.stage,
        forward_ns=spent[FORWARD],
        backward_ns=spent[BACKWARD],
        transfer_ns=spent[TRANSFER],
        other_ns=spent[OTHER],
        plan_wait_ns=waited,
        between_ns=between,
        reduction_ns=reduction,
        optimizer_ns=optimizer,
        planned_activation_bytes=activation_peak_bytes(item.entry),
        allocated_bytes=0 if memory is None else memory.allocated_bytes,
        reserved_bytes=0 if memory is None else memory.reserved_bytes,
        losses=losses,
    )


class EvaluationLosses:
    """The losses of evaluations since the last training iteration, added up on the device until they are taken."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, torch.Tensor]] = {}

    def begin(self, split: str) -> None:
        """Begin an evaluation: at the end of training Megatron evaluates the same state twice, which counts once."""
        self._sums.pop(split, None)

    def add(self, split: str, losses: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Add reports of (sum over tokens, tokens) by name; reports of another form are left out."""
        sums = self._sums.setdefault(split, {})
        for report in losses:
            for name, value in report.items():
                if value.numel() == 2:
                    part = value.detach().double().flatten()
                    sums[name] = sums[name] + part if name in sums else part

    def take(self, iteration: int) -> list[EvaluationRecord]:
        """Hand out a record for each split, after so many training iterations."""
        taken = self._sums
        self._sums = {}
        records = []
        for split, sums in taken.items():
            if sums:  # of the last stage
                values = torch.stack(list(sums.values())).tolist()
                losses = {name: (total, tokens) for name, (total, tokens) in zip(sums, values, strict=True)}
                records.append(EvaluationRecord(iteration=iteration, split=split, losses=losses))
        return records


class HostLosses:
    """An iteration's losses on their way to the host: reading them later does not wait for what is issued meanwhile.

    Args:
        losses: the last stage's reports of its micro-batches, each (sum over tokens, tokens) by name; reports of
            another form are left out.
    """

    def __init__(self, losses: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        for name in {name: None for report in losses for name in report}:
            reports = [report[name] for report in losses if name in report]
            if all(isinstance(pair, torch.Tensor) and pair.numel() == 2 for pair in reports):
                total = torch.stack([pair.detach().double().flatten() for pair in reports]).sum(0)
                self._sums[name] = total.to("cpu", non_blocking=True)  # pinned where it comes from a GPU
                if total.is_cuda:
                    self._copied = torch.cuda.Event()
        if self._copied is not None:
            self._copied.record()

    def read(self) -> dict[str, tuple[float, float]]:
        """(sum over tokens, tokens) of all micro-batches, by name."""
        if self._copied is not None:
            self._copied.synchronize()
        return {name: (float(total[0]), float(total[1])) for name, total in self._sums.items()}
