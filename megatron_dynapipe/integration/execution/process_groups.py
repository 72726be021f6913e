"""Process groups for transfers between Megatron's ranks: of a pipeline's channels, and for sharded messages."""

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.process_groups import PipelineGroups, backend_of, make_groups, warm_up


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
        staged: messages go through the host, whatever the device.
    """
    if staged:
        device = torch.device("cpu")
    mine = torch.tensor(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
    pipelines = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(mine)})
    groups = make_groups(pipelines, chunks=chunks, backend=backend_of(device), timeout_s=timeout_s)
    assert groups is not None, "every rank is in a pipeline"
    warm_up(groups, device)
    return groups


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
    made = {ranks: dist.new_group(list(ranks), backend=backend_of(device), timeout=timeout) for ranks in stages}
    group = next(group for ranks, group in made.items() if dist.get_rank() in ranks)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    gathered = torch.zeros(group.size(), device=device)
    dist.all_gather_into_tensor(gathered, gathered[:1].clone(), group=group)
    return group
