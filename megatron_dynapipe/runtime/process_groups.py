"""Process groups: one per channel of a pipeline, so that no transfer waits for another's; of any lists of ranks."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import Channel, Payload, channel_of

PAIRWISE_NCCL = "nccl-lazy" if hasattr(dist.distributed_c10d, "ProcessGroupNCCLLazy") else "nccl"
"""The backend with a communicator, and so a stream, for each pair of ranks: no transfer waits for another's.

From PyTorch 2.15 on `nccl` has one for a whole group, and binds the default group to a device."""
TRANSFER_BLOCKS = 8
"""Thread blocks of a pending receive, which spins on the device until its peer sends; NVLink would get 16 or more."""
_NEVER_SENT = 1 << 20
"""Tag of a receive that nobody sends."""


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
        The groups of the pipeline that this rank is in, or None if it is in none.

    Raises:
        ConfigError: the default process group is bound to a device, whose NCCL groups before PyTorch 2.15 have one
            stream each.
    """
    check_unbound(backend, getattr(dist.group.WORLD, "bound_device_id", None))
    joined: PipelineGroups | None = None
    for ranks in pipelines:
        groups = {
            channel: group_of_each([ranks], backend=backend, timeout_s=timeout_s, for_transfers=True)
            for channel in channels(len(ranks), chunks)
        }
        if dist.get_rank() in ranks:
            joined = PipelineGroups(ranks=tuple(ranks), channels={c: g for c, g in groups.items() if g is not None})
    return joined


def group_of_each(
    lists: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    for_transfers: bool = False,
) -> dist.ProcessGroup | None:
    """Make a group of each list of global ranks that names several. Every rank of the job calls it with the same lists.

    Args:
        lists: a rank is in one of them at most.
        backend: gloo or nccl; None takes the default group's.
        timeout_s: deadline of every operation; None takes torch's.
        for_transfers: over NCCL, each pair of ranks has a communicator, and a pending operation occupies
            `TRANSFER_BLOCKS` thread blocks at most.

    Returns:
        That of the list this rank is in; None where it is in none, or alone.
    """
    joined: dist.ProcessGroup | None = None
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    for ranks in lists:
        if len(ranks) > 1:
            pairwise = for_transfers and backend == "nccl"
            group = dist.new_group(
                list(ranks),
                backend=PAIRWISE_NCCL if pairwise else backend,
                timeout=timeout,
                pg_options=_few_blocks(timeout) if pairwise else None,
            )
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup), "this rank is in it"
                joined = group
    return joined


def _few_blocks(timeout: datetime.timedelta | None) -> object:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = TRANSFER_BLOCKS
    if timeout is not None:
        options._timeout = timeout  # torch warns of any other
    return options


def check_unbound(backend: str, device: torch.device | None) -> None:
    """Refuse groups over NCCL under a default group that is bound to a device: `init_process_group(device_id=…)`.

    Before PyTorch 2.15 such groups have one communicator and one stream for all their pairs of ranks: sends wait behind
    receives.
    """
    if backend == PAIRWISE_NCCL == "nccl" and device is not None:
        raise ConfigError(
            f"expected a default process group that is not bound to a device, got one bound to {device}: sends and "
            "receives of a stage would wait for each other",
            hint="call torch.cuda.set_device, and init_process_group without device_id",
        )


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


@contextlib.contextmanager
def groups_made() -> Iterator[list[dist.ProcessGroup]]:
    """A list that holds, after the block, the groups that it made and this rank is in, the latest first."""
    made: list[dist.ProcessGroup] = []
    known = set(dist.distributed_c10d._world.pg_map)
    yield made
    made += [group for group in reversed(dist.distributed_c10d._world.pg_map) if group not in known]


@contextlib.contextmanager
def bounded_waits(timeout_s: float, otherwise_s: float) -> Iterator[None]:
    """Have operations of all groups of this rank fail after `timeout_s` in the block, after `otherwise_s` behind it."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # until PyTorch 2.14

    def bound(seconds: float) -> None:
        for group in groups:
            set_timeout(datetime.timedelta(seconds=seconds), group)

    bound(min(timeout_s, otherwise_s))
    try:
        yield
    finally:
        bound(otherwise_s)


def break_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Close the connections of gloo groups: whoever waits in them fails at once. A receive that expires does so."""
    for group in groups:
        peer = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with contextlib.suppress(Exception):
            work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
            assert work is not None, "this rank is in it"
            work.wait(datetime.timedelta(milliseconds=1))


def backend_of(device: torch.device) -> str:
    """The backend that moves tensors of a device."""
    return "nccl" if device.type == "cuda" else "gloo"
