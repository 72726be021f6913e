"""Numbers of an iteration for Megatron's TensorBoard and Weights & Biases writers, and for its count of FLOPs.

They are this rank's view; Megatron's writers live on the last rank, which is of the last stage of the last replica.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.training import training
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, sequence_positions
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
from megatron_dynapipe.runtime import DevicePlatform

PREFIX = "dynapipe/"


def iteration_metrics(item: PlannedIteration, events: Sequence[Event], peak_bytes: int | None) -> dict[str, float]:
    """Numbers of an iteration, by name."""
    totals = item.entry.totals
    measured_ns = events[-1].end_ns - events[0].start_ns if events else 0
    busy_ns = sum(e.end_ns - e.start_ns for e in events if isinstance(e.instruction, Pass))
    metrics = {
        "padding efficiency": totals.padding_efficiency,
        "micro-batches": float(sum(totals.micro_batches)),
        "plan wait (ms)": item.waited_seconds * 1e3,
        "predicted time (ms)": totals.predicted_ns / NS_PER_MS,
        "measured time (ms)": measured_ns / NS_PER_MS,
        "bubbles": 1 - busy_ns / measured_ns if measured_ns else 0.0,
    }
    if peak_bytes is not None:
        metrics["peak memory (MB)"] = peak_bytes / BYTES_PER_MB
    return {PREFIX + name: value for name, value in metrics.items()}


def write_metrics(item: PlannedIteration, events: Sequence[Event], *, platform: DevicePlatform, interval: int) -> None:
    """Give every `interval`-th iteration's numbers to Megatron's writers, where this rank has them.

    The iteration has the number by which Megatron calls it (from 1).
    """
    iteration = item.entry.iteration + 1
    if iteration % interval == 0 and any(_writers()):
        _write(iteration_metrics(item, events, platform.peak_bytes()), iteration)


def write_task_losses(losses: Mapping[str, float], iteration: int) -> None:
    """Give Megatron's writers, where this rank has them, the loss of each task since the last line of the log."""
    if losses and any(_writers()):
        _write({f"{LOSS_NAME} by task/{task}": loss for task, loss in losses.items()}, iteration)


def _writers() -> tuple[Any, Any]:
    return get_tensorboard_writer(), get_wandb_writer()


def _write(numbers: Mapping[str, float], iteration: int) -> None:
    board, wandb = _writers()
    if board is not None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # there is no writer without it

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        board.file_writer.add_summary(Summary(value=values), iteration)  # `add_scalar` takes 50 µs for each number
    if wandb is not None:
        wandb.log(dict(numbers), iteration)


def count_flops(item: PlannedIteration, device: torch.device) -> bool:
    """Tell Megatron the real lengths of this rank's samples, from which it computes FLOPs per second, if it does.

    Its formula is that of decoder-only models, so a T5's stay as Megatron counts them, from nominal lengths. Every
    rank calls it in every training iteration: what is told is reduced over all ranks.
    """
    update = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)  # not in Megatron 0.18
    if update is None or item.entry.family.is_encoder_decoder:
        return False
    lengths = [
        sequence_positions(tokens)
        for batch in item.entry.micro_batches
        for place, tokens in enumerate(batch.input_lengths)
        if not (batch.share[1] or (batch.pieces and batch.pieces[place].start))  # else another has counted it
    ]
    ends = torch.tensor([0, *lengths] if lengths else [0, 0], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # Megatron copies it to the device: from memory that is not pinned, that waits for the device's work.
    update(ends.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ends)
    return True
