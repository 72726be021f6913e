"""Faults of a planned run, planted on one rank or all, at what the run takes from others: Megatron, torch, the data."""

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import optimizer

from megatron_dynapipe.data.collate import Collator, HostMicroBatch
from megatron_dynapipe.data.segments import RowSegments
from megatron_dynapipe.megatron.entry import bootstrap
from megatron_dynapipe.megatron.execution import megatron_stage, micro_batch_context
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.tools.certify import worker


def work(*, rank: int, world_size: int, role: str, family: str, argv: list[str], folder: str, fault: str | None) -> str:
    """One rank of a run of `certify`, with a fault; what it printed."""
    if fault is not None:
        globals()[fault]()
    sys.argv[1:] = argv
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        bootstrap.run(lambda: worker.train(role, family, Path(folder)))
    return output.getvalue()


def collated(change: Callable[[HostMicroBatch], HostMicroBatch]) -> None:
    """Change what the data gives this rank."""
    collate = Collator.__call__
    Collator.__call__ = lambda self, *arguments: change(collate(self, *arguments))


def offsets_swapped() -> None:
    def swapped(host: HostMicroBatch) -> HostMicroBatch:
        row = host.input_segments
        if parallel_state.get_pipeline_model_parallel_rank() != 1 or row is None or len(row.lengths) < 3 or row.cuts:
            return host
        offsets = row.offsets.tolist()
        offsets[1] = row.lengths[1]
        return replace(host, input_segments=RowSegments.of(offsets[:-1], offsets[-1]))

    collated(swapped)


def weight_dropped() -> None:
    dropped: list[int] = []

    def without_one(host: HostMicroBatch) -> HostMicroBatch:
        if host.loss_mask is not None and not dropped:
            dropped.append(host.index)
            host.loss_mask.reshape(-1)[: int(host.input_lengths[0])] = 0
        return host

    collated(without_one)


def averaged_by_micro_batch() -> None:
    calculate = megatron_stage.forward_step_calc_loss

    def averaged(*arguments: Any, **keywords: Any) -> Any:
        loss, tokens = calculate(*arguments, **keywords)
        return (loss / tokens * 100 if keywords["is_last_stage"] else loss), tokens

    megatron_stage.forward_step_calc_loss = averaged


def embeddings_not_reduced() -> None:
    sys.modules[finalize_model_grads.__module__]._allreduce_word_embedding_grads = lambda *_, **__: None


def shared_weights_not_reduced() -> None:
    megatron_stage.reduce_shared_gradients = lambda _: None


def positions_from_zero() -> None:
    def from_zero(host: HostMicroBatch) -> HostMicroBatch:
        row = host.input_segments
        if row is None or not row.cuts:
            return host
        offsets = row.offsets.tolist()
        fresh = RowSegments.of(offsets[:-1], offsets[-1])
        return replace(host, input_segments=replace(row, positions=fresh.positions))

    collated(from_zero)


def neighbours_key_seen() -> None:
    attend = SdpaCoreAttention._attend_packed

    def leaking(self: Any, query: Any, key: Any, value: Any, row: Any, *rest: Any, **keywords: Any) -> Any:
        starts = row.cu_seqlens_q[1:-1].long()
        starts = starts[starts < len(key)]
        seen = torch.zeros_like(key).index_add(0, starts, key[starts - 1])
        return attend(self, query, key + seen, value, row, *rest, **keywords)

    SdpaCoreAttention._attend_packed = leaking


def replica_counted_twice() -> None:
    finish = DistributedDataParallel.finish_grad_sync

    def doubled(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if dist.get_rank() == 1:
            for buffer in self.buffers:
                buffer.grad_data.mul_(2)
        return finish(self, *arguments, **keywords)

    DistributedDataParallel.finish_grad_sync = doubled


def stepping(change: Callable[[Any], bool]) -> None:
    """Have a function see Megatron's optimizer before each of its steps; the step is left out where it says so."""
    step = optimizer.FP32Optimizer.step_with_ready_grads
    optimizer.FP32Optimizer.step_with_ready_grads = lambda self: change(self) or step(self)


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def last_stage_never_steps() -> None:
    stepping(lambda _: is_last_stage())


def no_rank_steps() -> None:
    stepping(lambda _: True)


def groups_changed(change: Callable[[dict[str, Any]], None]) -> None:
    """Change the rates of each group of parameters before each step."""

    def changed(self: Any) -> bool:
        for group in self.optimizer.param_groups:
            change(group)
        return False

    stepping(changed)


def ten_times_the_decay() -> None:
    groups_changed(lambda group: group.update(weight_decay=10 * group["weight_decay"]))


def half_the_rate_on_one_stage() -> None:
    groups_changed(lambda group: group.update(lr=group["lr"] / (2 if is_last_stage() else 1)))


def other_betas() -> None:
    groups_changed(lambda group: group.update(betas=(0.0, 0.5)))


def decay_of_norms_and_biases() -> None:
    groups_changed(lambda group: group.update(weight_decay=1 - group["weight_decay"]))


def mask_drawn_anew() -> None:
    (owner,) = (c for c in vars(micro_batch_context).values() if hasattr(c, "_derive"))
    derive, calls = owner._derive, Counter[tuple[object, ...]]()

    def anew(self: Any, place: str, whose: object) -> int:
        calls[self._pass, place, whose] += 1
        return derive(self, f"{place} {calls[self._pass, place, whose] % 2}", whose)

    owner._derive = anew
