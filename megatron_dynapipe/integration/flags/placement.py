"""Placement of ranks on nodes and of layers on stages: torchrun's defaults, or lists from the command line."""

import os
from itertools import groupby

from megatron_dynapipe.errors import ConfigError


def devices_per_node(given: str | None, world_size: int) -> int:
    """Ranks on one node.

    Args:
        given: "rank:node" of every rank, separated by commas; None takes torchrun's word.
        world_size: number of ranks.

    Raises:
        ConfigError: not of that form, a rank is missing or named twice, or nodes do not hold equal, consecutive blocks
            of ranks, which is what transfers are predicted for.
    """
    if given is None:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    form = f"expected --dynapipe-device-to-node rank:node,… for each of the {world_size} ranks, as 0:0,1:0,2:1,3:1"
    pairs = [entry.split(":") for entry in given.split(",")]
    if not all(len(pair) == 2 and pair[0].strip().isdecimal() and pair[1].strip().isdecimal() for pair in pairs):
        raise ConfigError(f"{form}, got {given!r}")
    nodes = {int(rank): int(node) for rank, node in pairs}
    if len(nodes) != len(pairs) or sorted(nodes) != list(range(world_size)):
        raise ConfigError(f"{form}, got the ranks {', '.join(pair[0].strip() for pair in pairs)}")
    blocks = [(node, len(list(ranks))) for node, ranks in groupby(nodes[rank] for rank in range(world_size))]
    sizes = {size for _, size in blocks}
    if len(sizes) != 1 or len({node for node, _ in blocks}) != len(blocks):
        raise ConfigError(
            f"expected --dynapipe-device-to-node to give every node as many consecutive ranks, got {given!r}"
        )
    return sizes.pop()


def ranks_per_device(devices: int) -> int:
    """The most ranks of this node, as torchrun started them, that share one of its devices."""
    return -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // devices)


def device_index(local_rank: int, *, devices: int, backend: str) -> int:
    """The GPU of a rank of this node: its own, or over gloo a shared one, round robin.

    Args:
        local_rank: of the node's ranks.
        devices: GPUs of the node.
        backend: of the process groups, which must be able to connect ranks on one GPU.

    Raises:
        ConfigError: ranks would share a GPU over NCCL.
    """
    if ranks_per_device(devices) > 1 and backend != "gloo":
        raise ConfigError(
            f"expected a GPU for each of this node's {os.environ['LOCAL_WORLD_SIZE']} ranks, got {devices}: "
            f"{backend} does not connect ranks on one",
            hint="start fewer ranks, or try them on one GPU with --distributed-backend gloo",
        )
    return local_rank % devices


def layers_per_stage(given: str, *, layers: int, stages: int, chunks: int) -> tuple[int, ...]:
    """Layers on each virtual stage, in model order, from the stage of every layer.

        0,0,0,1        →  3, 1       two stages
        0,0,1,1,0,0,1,1  →  2, 2, 2, 2  two stages with two chunks each

    Args:
        given: the pipeline stage of every layer, separated by commas.
        layers: of the whole model.
        stages: pipeline ranks.
        chunks: virtual stages per rank.

    Raises:
        ConfigError: not of that form, not one entry per layer, or stages not in the order in which layers run.
    """
    form = f"expected --dynapipe-layer-to-device to list the stage of each of the {layers} layers"
    entries = given.split(",")
    if not all(entry.strip().isdecimal() for entry in entries):
        raise ConfigError(f"{form}, as 0,0,1,1, got {given!r}")
    if len(entries) != layers:
        raise ConfigError(f"{form}, got {len(entries)} entries")
    runs = [(stage, len(list(run))) for stage, run in groupby(int(entry) for entry in entries)]
    order = [virtual % stages for virtual in range(stages * chunks)]
    if [stage for stage, _ in runs] != order:
        raise ConfigError(
            f"{form} in the order in which they run, {','.join(map(str, order))} with repetitions, got {given!r}"
        )
    return tuple(size for _, size in runs)


def chunks(given: str, stages: int) -> int:
    """Virtual stages per rank in a list of every layer's stage; 1 if ranks have different numbers of them."""
    runs = len(list(groupby(given.split(","))))
    return runs // stages if stages > 1 and runs % stages == 0 else 1


def planner_count(given: int | None, *, nodes: int) -> int:
    """Planner processes of a job of so many nodes: as many on each as were asked for, else one in all.

    Raises:
        ConfigError: less than one was asked for.
    """
    if given is not None and given < 1:
        raise ConfigError(f"expected --dynapipe-prefetch-planner-num-workers of at least 1, got {given}")
    return 1 if given is None else given * nodes


def node_of(rank: int) -> int:
    """The node of a rank, as torchrun numbers them."""
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def nodes(world_size: int) -> int:
    """Nodes of a job of this many ranks."""
    return max(world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
