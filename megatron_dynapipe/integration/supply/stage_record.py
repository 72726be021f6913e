"""One stage's part of an iteration as a record: where its time and memory went, and the losses of the last stage."""

from collections.abc import Mapping, Sequence

import torch

from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.plan.memory import activation_peak_bytes
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.report.records import StageRecord
from megatron_dynapipe.report.stage_times import BACKWARD, FORWARD, OTHER, TRANSFER, time_by_kind
from megatron_dynapipe.runtime.device_memory import MemoryCounts


def stage_record(
    item: PlannedIteration,
    events: Sequence[Event],
    losses: Sequence[Mapping[str, torch.Tensor]],
    memory: MemoryCounts | None,
    *,
    previous_end_ns: int | None,
) -> StageRecord:
    """The record of one stage.

    Args:
        item: the iteration, as it was run.
        events: when its instructions ran.
        losses: the last stage's reports, each (sum over tokens, tokens) by name; none on other stages.
        memory: what the device's allocator has counted.
        previous_end_ns: when the previous iteration's list ended; None before the first.
    """
    spent, waited = time_by_kind(events), round(item.waited_seconds * 1e9)
    between = events[0].start_ns - previous_end_ns - waited if events and previous_end_ns is not None else 0
    return StageRecord(
        iteration=item.entry.iteration,
        replica=item.entry.replica,
        stage=item.entry.stage_plan.stage,
        forward_ns=spent[FORWARD],
        backward_ns=spent[BACKWARD],
        transfer_ns=spent[TRANSFER],
        other_ns=spent[OTHER],
        plan_wait_ns=waited,
        between_ns=max(between, 0),
        planned_activation_bytes=activation_peak_bytes(item.entry),
        allocated_bytes=0 if memory is None else memory.allocated_bytes,
        reserved_bytes=0 if memory is None else memory.reserved_bytes,
        losses=_summed(losses),
    )


def _summed(losses: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Sums over micro-batches; reports that are not (sum, tokens) are left out."""
    found: dict[str, tuple[float, float]] = {}
    for name in {name: None for report in losses for name in report}:
        reports = [report[name] for report in losses if name in report]
        if all(each.numel() == 2 for each in reports):
            total, tokens = torch.stack([each.detach().double().flatten() for each in reports]).sum(0).tolist()
            found[name] = total, tokens
    return found
