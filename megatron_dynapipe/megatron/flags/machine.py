"""The machine of a run: its ranks, nodes and devices, their memory, the cluster file that describes them, and what
layers cost there.

limit or links of a flag or measured by the cost model's file   >   cluster file   >   what the device says, or defaults
"""

import argparse
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.config import CLUSTERS, Cluster, cluster_file, read_cluster
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.costing import A100_RATES, CPU_RATES, ModelShape, Network
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.costing.file import check_measured_model
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts

AUTO = "auto"
NONE = "none"
MEMORY_SHARE = 0.9
"""Share of a device's memory that plans may use where no limit is given; the rest is for the allocator's
fragments, communication buffers and kernels' workspaces."""
_MOST_BY_TOKENS = 4096
"""Samples of a micro-batch at most, where an iteration has any number of them."""


def world_size() -> int:
    """Number of ranks, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Ranks of this node, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def processor() -> str:
    """Name of the processor here."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def processor_and_cores() -> str:
    """Its name, and how many cores there are."""
    return f"{processor()}, {os.cpu_count()} cores"


def nodes() -> int:
    """Nodes of the job."""
    return max(world_size() // local_world_size(), 1)


def node_of(rank: int) -> int:
    """The node of a rank, as torchrun numbers them."""
    return rank // local_world_size()


def spare_cores() -> int:
    """Cores of this node that its ranks leave to a planner: all but two for each, and at least one."""
    return max(len(os.sched_getaffinity(0)) - 2 * local_world_size(), 1)


def ranks_per_device(devices: int) -> int:
    """The most ranks of this node that share one of its devices."""
    return -(-local_world_size() // devices)


def device_index(local_rank: int, *, devices: int, backend: str) -> int:
    """The GPU of a rank of this node: its own, or over gloo a shared one, round robin.

    Raises:
        ConfigError: ranks would share a GPU over NCCL.
    """
    if ranks_per_device(devices) > 1 and backend != "gloo":
        raise ConfigError(
            f"expected a GPU for each of this node's {local_world_size()} ranks, got {devices}: "
            f"{backend} does not connect ranks on one",
            hint="start fewer ranks, or try them on one GPU with --distributed-backend gloo",
        )
    return local_rank % devices


def cluster_of(named: str, *, device: torch.device) -> Cluster | None:
    """The cluster of `--dynapipe-cluster`; None where no file is named and none is known for a device.

    Raises:
        ConfigError: the file cannot be read, or does not give all of memory and links.
    """
    if named == NONE or (named == AUTO and device.type == "cpu"):
        return None
    if named != AUTO:
        return read_cluster(Path(named))
    name = torch.cuda.get_device_name(device.index)
    file = cluster_file(name)
    return None if file is None else read_cluster(CLUSTERS / f"{file}.yaml", name)


def describe(cluster: Cluster) -> str:
    """The file that is used and why, for a run's log."""
    by_name = f"found by the device's name, {cluster.device}; --dynapipe-cluster names another"
    why = by_name if cluster.device else "as named"
    return f"memory and links of {cluster.path.name} ({why}), where nothing else gives them"


def network(measured: Mapping[str, Link], cluster: Cluster | None) -> Network:
    """Links as the cost model has measured them, else as the cluster's file says, else `Network`'s."""
    known = {} if cluster is None else cluster.links
    devices = None if cluster is None else cluster.devices_per_node
    return Network.over({**known, **measured}, devices_per_node=devices or local_world_size())


def device_memory_bytes(cluster: Cluster | None, *, on_cpu: bool) -> int:
    """Memory that plans may use where no limit is given: what a named cluster file says, else this rank's part of what
    the device's file says, or of a share of the device or the host.

    Raises:
        ConfigError: the host does not say how much memory it has.
    """
    if cluster is not None and not cluster.device:
        return cluster.memory_limit_bytes  # named, as a limit of each rank would be
    if not on_cpu:
        if cluster is None:
            device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * MEMORY_SHARE
        else:
            device = cluster.memory_limit_bytes
        return int(device / ranks_per_device(torch.cuda.device_count()))
    try:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError) as error:
        raise ConfigError(
            "this host does not say how much memory it has", hint="pass --dynapipe-device-memory-limit MB"
        ) from error
    return int(host / local_world_size() * MEMORY_SHARE)


def costs_of(args: argparse.Namespace, shape: ModelShape, device: torch.device) -> MeasuredCosts | AnalyticCosts:
    """The costs of a run: of its cost model file, else computed."""
    by_tokens = args.tokens_per_global_batch is not None
    return known_costs(
        args.dynapipe_cost_model,
        shape,
        device,
        tensor_parallel=args.tensor_model_parallel_size,
        element_bytes=args.params_dtype.itemsize,
        max_size=max(args.global_batch_size, args.eval_global_batch_size, _MOST_BY_TOKENS if by_tokens else 1),
        max_length=max(args.seq_length, args.decoder_seq_length or 0),
    )


def known_costs(
    file: Path | None,
    shape: ModelShape,
    device: torch.device,
    *,
    tensor_parallel: int | None = None,
    element_bytes: int,
    max_size: int,
    max_length: int,
) -> MeasuredCosts | AnalyticCosts:
    """The costs of a cost model file, read here; without one, those by this device's rates, else by a common one's."""
    if file is not None:
        costs = MeasuredCosts(path=str(file.absolute()))
        check_measured_model(costs.load().file, msgspec.structs.asdict(shape), tensor_parallel=tensor_parallel)
        return costs
    rates = CPU_RATES if device.type == "cpu" else rates_of(torch.cuda.get_device_name(device)) or A100_RATES
    return AnalyticCosts(
        shape=shape,
        rates=msgspec.structs.replace(rates, element_bytes=element_bytes),
        max_size=max_size,
        max_length=max_length,
    )
