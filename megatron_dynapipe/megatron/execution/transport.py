"""How this rank's stage exchanges tensors with its neighbours: groups, and the transports over them."""

import uuid

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import ScatterGather
from megatron_dynapipe.megatron.models.shared_keys import Teams
from megatron_dynapipe.outputs import say
from megatron_dynapipe.runtime import (
    HostStagedTransport,
    ScatterGatherTransport,
    StepRunner,
    TorchTransport,
    Transport,
    step_runner,
)
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.process_groups import PipelineGroups, backend_of, group_of_each, make_groups, warm_up
from megatron_dynapipe.ways.teams_rule import team_sizes


def open_runner(
    control: ControlGroup,
    settings: PlannerSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
    adds_up: bool,
    through_host: bool = False,
) -> StepRunner:
    """Make the process groups of all pipelines, and the runner of this rank's steps. Every rank calls it at one point.

    Messages are divided over the tensor-parallel ranks where the planner counts on it. If ranks share a GPU, which
    NCCL refuses, they go through the host, undivided. Rank 0 says either in one line.

    Args:
        control: by which ranks tell each other where they are.
        settings: those that plans are made with.
        device: this rank's.
        dtype: the type of the tensors that cross stage boundaries.
        timeout_s: deadline of every transfer.
        adds_up: steps sum losses over all ranks; Megatron's loop does it by itself.
        through_host: messages go through the host, so that nothing is pending on a device while a pass waits for it.

    Raises:
        ConfigError: messages are to be divided, but go through the host.
    """
    shared = share_a_device(control, device)
    staged = shared or through_host
    groups = connect(control, chunks=settings.chunks, device=device, timeout_s=timeout_s, staged=staged)
    stage = groups.ranks.index(control.rank)
    wire = TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s)
    if shared:
        transport: Transport = _through_the_host(control, settings, wire)
    elif staged:
        transport = HostStagedTransport(wire)
    else:
        transport = _sharded(control, settings, wire, stage=stage, device=device, timeout_s=timeout_s)
    return step_runner(
        transport,
        device,
        stage=stage,
        stages=len(groups.ranks),
        chunks=settings.chunks,
        dtype=dtype,
        deadline_s=timeout_s,
        control=control if adds_up else None,
    )


def _through_the_host(control: ControlGroup, settings: PlannerSettings, wire: Transport) -> Transport:
    if settings.scatter_gather is ScatterGather.ON:
        raise ConfigError(
            "ranks share a GPU, so that messages go through the host: they cannot be divided there",
            hint="leave scatter-gather at auto or off, or give every rank a GPU of its own",
        )
    say("ranks share a GPU: messages between stages go through the host, which NCCL would not do")
    return HostStagedTransport(wire)


def _sharded(
    control: ControlGroup,
    settings: PlannerSettings,
    wire: Transport,
    *,
    stage: int,
    device: torch.device,
    timeout_s: float,
) -> Transport:
    """The transport with messages divided where that is planned."""
    links = links_of(settings)
    if not (any(links.sharded) and links.gbps.size):
        return wire
    group = tensor_group(control, device=device, timeout_s=timeout_s)
    size = parallel_state.get_tensor_model_parallel_world_size()
    which = "where that is faster" if settings.scatter_gather is ScatterGather.AUTO else "all of them"
    say(f"messages between stages are divided over {size} tensor-parallel ranks, {which}")
    return ScatterGatherTransport(wire, group, stage=stage, is_sharded=links.is_sharded)


def connect(
    control: ControlGroup, *, chunks: int, device: torch.device, timeout_s: float, staged: bool = False
) -> PipelineGroups:
    """Find the pipelines of the job, make the groups of all of them, and warm up this rank's.

    Every rank calls it, at the same point. If `staged`, messages go through the host, whatever the device.
    """
    if staged:
        device = torch.device("cpu")
    pipeline = torch.tensor(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
    pipelines = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(pipeline)})
    groups = make_groups(pipelines, chunks=chunks, backend=backend_of(device), timeout_s=timeout_s)
    assert groups is not None, "every rank is in a pipeline"
    warm_up(groups, device)
    return groups


def tensor_group(control: ControlGroup, *, device: torch.device, timeout_s: float) -> dist.ProcessGroup:
    """The tensor-parallel ranks of this one's stage, as a group that carries nothing but gathers; warmed up.

    Every rank calls it, at the same point: all of them make all the groups, in one order.
    """
    stage = torch.tensor(dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()))
    stages = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(stage)})
    group = group_of_each(stages, backend=backend_of(device), timeout_s=timeout_s)
    assert group is not None, "messages are divided over several ranks"
    gathered = torch.zeros(group.size(), device=device)
    dist.all_gather_into_tensor(gathered, gathered[:1].clone(), group=group)
    return group


def team_groups(control: ControlGroup, settings: PlannerSettings, *, device: torch.device, timeout_s: float) -> Teams:
    """Make this rank's team of every size that plans may have, of neighbours among the replicas, and warm it up.

    Every rank calls it, at the same point: all of them make all the groups, in one order.
    """
    teams: Teams = {}
    replicas = torch.tensor(dist.get_process_group_ranks(parallel_state.get_data_parallel_group()))
    lists = sorted({tuple(int(rank) for rank in ranks) for ranks in control.gather(replicas)})
    for size in team_sizes(settings.context_teams):
        of_size = [ranks[first : first + size] for ranks in lists for first in range(0, len(ranks), size)]
        full = [ranks for ranks in of_size if len(ranks) == size]
        group = group_of_each(full, backend=backend_of(device), timeout_s=timeout_s)
        if group is not None:
            teams[size] = group
            gathered = torch.zeros(size, device=device)
            dist.all_gather_into_tensor(gathered, gathered[:1].clone(), group=group)
    return teams


def share_a_device(control: ControlGroup, device: torch.device) -> bool:
    """Whether any two ranks of the job are on one CUDA device."""
    if device.type != "cuda":
        return False
    identity = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid))
    identities = control.gather(torch.tensor(list(identity.bytes), dtype=torch.uint8))
    return len({tuple(identity.tolist()) for identity in identities}) < len(identities)
