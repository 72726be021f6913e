"""What a run runs on: GPUs of ranks, its cluster file, links and memory."""

import os
from pathlib import Path

import pytest
import torch

from megatron_dynapipe import config
from megatron_dynapipe.config import read_cluster
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import INTER_NODE, INTRA_NODE, Link
from megatron_dynapipe.costing import Network
from megatron_dynapipe.megatron.flags import machine
from tests.configs.test_configs import CLUSTERS

FILES = {
    "GB200": "gb200_186gb",
    "B200": "b200_180gb",
    "H200": "h200_141gb",
    "H100 80GB HBM3": "h100_80gb",
    "A100-SXM4-80GB": "a100_80gb",
    "A100-SXM4-40GB": "a100_40gb",
    **dict.fromkeys(("H100 PCIe", "H200 NVL", "GH200 480GB", "A100-PCIE-40GB", "GeForce RTX 4090")),
}


@pytest.mark.parametrize("device", FILES)
def test_a_device_finds_its_file(device: str) -> None:
    assert config.cluster_file(f"NVIDIA {device}") == FILES[device]
    assert (config.cluster_file(f"NVIDIA {device}", of_kind=True) is None) == ("RTX" in device)


def test_every_file_is_some_devices() -> None:
    assert sorted(file for _, file in config.BY_DEVICE) == sorted(path.stem for path in CLUSTERS)


def test_the_ranks_own_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: asked.append(index) or "NVIDIA H200")
    device = torch.device("cuda", 3)
    found = machine.cluster_of("auto", device=device)
    assert asked == [3], "asking for the current device would make a context on the first"
    assert found is not None and found.memory_limit_bytes == 127 * 10**9
    said = machine.describe(found)
    assert said.startswith("memory and links of h200_141gb.yaml (found by the device's name, NVIDIA H200; ")
    assert (found.links[INTRA_NODE].gbps, found.links[INTER_NODE].latency_us) == (3040, 20)
    assert machine.cluster_of("none", device=device) is None
    assert machine.cluster_of("auto", device=torch.device("cpu")) is None
    assert asked == [3]


def test_memory_is_divided_over_the_ranks_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    path = config.CLUSTERS / "h100_80gb.yaml"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = read_cluster(path, "NVIDIA H100 80GB HBM3")
    assert machine.device_memory_bytes(found, on_cpu=False) == 36 * 10**9
    named = read_cluster(path)
    assert machine.describe(named) == "memory and links of h100_80gb.yaml (as named), where nothing else gives them"
    assert machine.device_memory_bytes(named, on_cpu=False) == 72 * 10**9, "as a flag's limit is each rank's"


MEASURED = {"intra-node": Link(latency_us=60.0, gbps=25.0)}
WHOLE = """device-memory-mb: 1000
intra-node-gbps: 600
inter-node-gbps: 100
intra-node-latency-us: 0
inter-node-latency-us: 20
"""


def test_links_are_measured_or_the_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    path = tmp_path / "cluster.yaml"
    path.write_text(WHOLE + "devices-per-node: 2\n")
    for links, intra in (({}, Link(latency_us=0.0, gbps=600.0)), (MEASURED, MEASURED["intra-node"])):
        network = machine.network(links, read_cluster(path))
        assert (network.intra_node_gbps, network.intra_node_latency_us) == (intra.gbps, intra.latency_us)
        assert (network.devices_per_node, network.inter_node_gbps, network.inter_node_latency_us) == (2, 100.0, 20.0)
        assert machine.network(links, None) == Network.over(links, devices_per_node=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device-memory-mb: 1", "expected intra-node-gbps as a number above 0 and of at most [0-9,]+, got None"),
        (WHOLE.replace("600", "0"), "expected intra-node-gbps as a number above 0 and of at most [0-9,]+, got 0"),
        (
            WHOLE.replace("20", "-1"),
            "expected inter-node-latency-us as a number of at least 0 and of at most [0-9,]+, got -1",
        ),
        (
            WHOLE.replace("600", "fast"),
            "expected intra-node-gbps as a number above 0 and of at most [0-9,]+, got 'fast'",
        ),
        (WHOLE + "devices-per-node: 0", "expected devices-per-node as a number above 0 and of at most [0-9,]+, got 0"),
        ("num-layers: 3", "'num-layers' is not a key of a cluster file"),
        ("[1]", "to be a mapping"),
    ],
)
def test_a_file_that_is_no_clusters_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(path)


@pytest.mark.parametrize(
    ("devices", "backend", "expected", "share"),
    [
        (1, "nccl", [0], 1),
        (4, "nccl", [0, 1, 2, 3], 1),
        (8, "nccl", [0, 1], 1),
        (1, "gloo", [0, 0, 0, 0], 4),
        (2, "gloo", [0, 1, 0, 1, 0], 3),
    ],
)
def test_ranks_take_gpus_in_turn(monkeypatch, devices, backend, expected, share):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(expected)))
    indices = [machine.device_index(rank, devices=devices, backend=backend) for rank in range(len(expected))]
    assert (indices, machine.ranks_per_device(devices)) == (expected, share)


def test_ranks_do_not_share_a_gpu_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="a GPU for each of this node's 4 ranks, got 2: nccl does not") as caught:
        machine.device_index(1, devices=2, backend="nccl")
    assert "--distributed-backend gloo" in str(caught.value.hint)


@pytest.mark.parametrize(("cores", "ranks", "spare"), [(64, 8, 48), (16, 8, 1), (2, 2, 1), (4, 1, 2)])
def test_a_planner_has_the_cores_that_ranks_leave(monkeypatch, cores, ranks, spare) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert machine.spare_cores() == spare
