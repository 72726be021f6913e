"""Process groups for transfers: one per channel of a pipeline, so that channels never wait for one another.

And one over the tensor-parallel ranks of a stage, for sharded messages.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dynapipe.integration.supply.control_group import ControlGroup
from megatron_dynapipe.plan.instructions import Channel, Payload, channel_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGroups:
    """The pipeline a rank is in: the global rank of every stage, and a process group per channel over them."""

    ranks: Sequence[int]
    channels: dict[Channel, dist.ProcessGroup]


def channels(stages: int, chunks: int) -> list[Channel]:
    """The channels of a pipeline, in the order in which their groups are made.

    Those around the ring's end carry what passes from the last stage's chunk to the first stage's next one.
    """
    if stages == 1:
        return []
    wraps = (False, True) if chunks > 1 else (False,)
    return [
        Channel(payload, payload is Payload.ACTIVATION, wrap)
        for payload in (Payload.ACTIVATION, Payload.GRADIENT)
        for wrap in wraps
    ]


def make_groups(
    pipelines: Sequence[Sequence[int]], *, chunks: int, backend: str, timeout_s: float
) -> PipelineGroups | None:
    """Make the groups of all pipelines of the job: every rank takes part, in the same order.

    Args:
        pipelines: global ranks of every pipeline, by stage.
        chunks: virtual stages per rank.
        backend: gloo or nccl.
        timeout_s: deadline of every operation.

    Returns:
        Those of the pipeline this rank is in, or None if it is in none.
    """
    mine: PipelineGroups | None = None
    for ranks in pipelines:
        made: dict[Channel, dist.ProcessGroup] = {}
        for channel in channels(len(ranks), chunks):
            group = dist.new_group(list(ranks), backend=backend, timeout=datetime.timedelta(seconds=timeout_s))
            if isinstance(group, dist.ProcessGroup):
                made[channel] = group
        if dist.get_rank() in ranks:
            mine = PipelineGroups(ranks=tuple(ranks), channels=made)
    return mine


def connect(
    control: ControlGroup, *, chunks: int, device: torch.device, timeout_s: float, staged: bool = False
) -> PipelineGroups:
    """Find the pipelines of the job, make the groups of all of them, and warm up this rank's.

    Every rank calls it, at the same point.

    Args:
        control: by which ranks tell each other their pipelines.
        chunks: virtual stages per rank.
        device: where transfers take place.
        timeout_s: deadline of every operation.
        staged: messages go by way of the host, whatever the device.
    """
    if staged:
        device = torch.device("cpu")
    mine = torch.tensor(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
    pipelines = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(mine)})
    groups = make_groups(pipelines, chunks=chunks, backend=_backend(device), timeout_s=timeout_s)
    assert groups is not None, "every rank is in a pipeline"
    warm_up(groups, device)
    return groups


def warm_up(groups: PipelineGroups, device: torch.device) -> None:
    """Make every pair's connection once, in a fixed order.

    NCCL makes a communicator for a pair at its first transfer, which both ends must reach at the same point; in
    training the order of first transfers differs from stage to stage.
    """
    stages = len(groups.ranks)
    stage = groups.ranks.index(dist.get_rank())
    probe = torch.zeros(1, device=device)
    for channel, group in groups.channels.items():
        step = 1 if channel.downstream else -1
        for source in range(stages):
            destination = (source + step) % stages
            if channel_of(channel.payload, source, destination, stages) != channel:
                continue
            if stage == source:
                dist.send(probe, groups.ranks[destination], group=group)
            elif stage == destination:
                dist.recv(probe, groups.ranks[source], group=group)


def tensor_group(control: ControlGroup, *, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """The tensor-parallel ranks of this one's stage, as a group that carries nothing but gathers; warmed up.

    Every rank calls it, at the same point: all of them make all the groups, in one order.

    Args:
        control: by which ranks tell each other who they are parallel with.
        device: where gathers take place.
        timeout_s: deadline of every gather.
    """
    mine = torch.tensor(dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))
    stages = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(mine)})
    timeout = datetime.timedelta(seconds=timeout_s)
    made = {ranks: dist.new_group(list(ranks), backend=_backend(device), timeout=timeout) for ranks in stages}
    group = next(group for ranks, group in made.items() if dist.get_rank() in ranks)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    gathered = torch.zeros(group.size(), device=device)
    dist.all_gather_into_tensor(gathered, gathered[:1].clone(), group=group)
    return group


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
