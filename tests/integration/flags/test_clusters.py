"""A run's cluster file: found by the device's name, named by the user, below what is given or measured."""

import argparse
from pathlib import Path

import pytest
import torch

from megatron_dynapipe.cost.format import INTER_NODE, INTRA_NODE
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import clusters, plan_inputs
from tests.configs.test_configs import CLUSTERS


@pytest.mark.parametrize(
    ("device", "file"),
    [
        ("NVIDIA H200", "h200_141gb"),
        ("NVIDIA H100 80GB HBM3", "h100_80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_finds_its_file(device: str, file: str | None) -> None:
    found = clusters.find(device)
    assert (found and found.stem) == file


def test_every_file_is_some_devices() -> None:
    assert sorted(file for _, file in clusters.BY_DEVICE) == sorted(path.stem for path in CLUSTERS)


def args_of(cluster: str) -> argparse.Namespace:
    return argparse.Namespace(dynapipe_cluster=cluster, local_rank=3)


def test_the_ranks_own_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: asked.append(index) or "NVIDIA H200")
    found = clusters.cluster_of(args_of("auto"), on_cpu=False)
    assert asked == [3], "asking for the current device would make a context on the first"
    assert found is not None and found.memory_limit_bytes == 127 * 10**9
    assert str(found).startswith("memory and links of h200_141gb.yaml (found by the device's name, NVIDIA H200; ")
    assert (found.links[INTRA_NODE].gbps, found.links[INTER_NODE].latency_us) == (3600, 20)
    for switched_off in (args_of("none"),):
        assert clusters.cluster_of(switched_off, on_cpu=False) is None
    assert clusters.cluster_of(args_of("auto"), on_cpu=True) is None
    assert asked == [3]


def test_memory_is_divided_over_the_ranks_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    path = clusters.FOLDER / "h100_80gb.yaml"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = clusters.read(path, "NVIDIA H100 80GB HBM3")
    assert plan_inputs.device_memory_bytes(found, on_cpu=False) == 36 * 10**9
    named = clusters.read(path)
    assert str(named) == "memory and links of h100_80gb.yaml (as named), where no flag gives them"
    assert plan_inputs.device_memory_bytes(named, on_cpu=False) == 72 * 10**9, "as a flag's limit is each rank's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynapipe-device-memory-limit: 1", "expected dynapipe-intra-node-bw as a number above 0, got None"),
        ("num-layers: 3", "'num-layers' is not a flag"),
        ("[1]", "to be a mapping"),
    ],
)
def test_a_file_that_is_no_clusters_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        clusters.cluster_of(args_of(str(path)), on_cpu=True)
