"""Where ranks and layers lie: devices on nodes, GPUs of ranks, the stage of every layer."""

import argparse

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import arguments, placement, split_words
from megatron_dynapipe.units import ModelFamily


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ("0:0,1:0,2:1,3:1", 4, 2),
        ("3:1, 2:1, 1:0, 0:0", 4, 2),
        ("0:5,1:5", 2, 2),
        ("0:0,1:1", 2, 1),
    ],
)
def test_devices_per_node(given, ranks, expected):
    assert placement.devices_per_node(given, ranks) == expected


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ("0:0,1:0", 4, "each of the 4 ranks, as 0:0,1:0,2:1,3:1, got the ranks 0, 1"),
        ("0:0,0:0", 2, "got the ranks 0, 0"),
        ("0:0,2:0", 2, "got the ranks 0, 2"),
        ("0,0", 2, "as 0:0,1:0,2:1,3:1, got '0,0'"),
        ("", 1, "got ''"),
        ("0:0,1:1,2:0", 3, "as many consecutive ranks"),
        ("0:0,1:0,2:1", 3, "as many consecutive ranks"),
        ("0:0,1:1,2:0,3:1", 4, "as many consecutive ranks"),
    ],
)
def test_devices_to_nodes_that_cannot_be(given, ranks, said):
    with pytest.raises(ConfigError) as told:
        placement.devices_per_node(given, ranks)
    assert said in told.value.message


@pytest.mark.parametrize(
    ("ranks", "devices", "backend", "expected", "share"),
    [
        (1, 1, "nccl", [0], 1),
        (4, 4, "nccl", [0, 1, 2, 3], 1),
        (2, 8, "nccl", [0, 1], 1),
        (4, 4, "gloo", [0, 1, 2, 3], 1),
        (4, 1, "gloo", [0, 0, 0, 0], 4),
        (5, 2, "gloo", [0, 1, 0, 1, 0], 3),
    ],
)
def test_gpus_of_ranks(monkeypatch, ranks, devices, backend, expected, share):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    found = [placement.device_index(rank, devices=devices, backend=backend) for rank in range(ranks)]
    assert (found, placement.ranks_per_device(devices)) == (expected, share)


def test_ranks_do_not_share_a_gpu_over_nccl(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="a GPU for each of this node's 4 ranks, got 2: nccl does not") as told:
        placement.device_index(1, devices=2, backend="nccl")
    assert "--distributed-backend gloo" in told.value.hint


@pytest.mark.parametrize(
    ("given", "stages", "chunks", "expected"),
    [
        ("0,0,0,1", 2, 1, (3, 1)),
        ("0,0,1,1,2,2,3,3", 4, 1, (2, 2, 2, 2)),
        ("0,0,1,1,0,0,1,1", 2, 2, (2, 2, 2, 2)),
        ("0,1,0,0,1", 2, 2, (1, 1, 2, 1)),
        ("0,0", 1, 1, (2,)),
    ],
)
def test_layers_per_stage(given, stages, chunks, expected):
    layers = len(given.split(","))
    assert placement.layers_per_stage(given, layers=layers, stages=stages, chunks=chunks) == expected


@pytest.mark.parametrize(
    ("given", "stages", "chunks"),
    [("0,0,1,1", 2, 1), ("0,1,0,1", 2, 2), ("0,1,0", 2, 1), ("0,0", 1, 1), ("0,1,2,0,1,2", 3, 2)],
)
def test_chunks_follow_from_the_layers_stages(given, stages, chunks):
    assert placement.chunks(given, stages) == chunks


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dynapipe-layer-to-device 0,0,1,1", []),
        ("--dynapipe-layer-to-device 0,0,0,1", ["--dynapipe-layers-per-stage", "3,1"]),
        ("--dynapipe-layer-to-device 0,1,0,1", ["--dynapipe-layers-per-stage", "1,1,1,1"]),
        ("--dynapipe-layer-to-device 0,1,0,1 --num-virtual-stages-per-pipeline-rank 2", []),
        ("--dynapipe-layer-to-device 0,1,0,1 --num-layers-per-virtual-pipeline-stage 1", []),
        ("", []),
    ],
)
def test_every_layers_stage_becomes_layers_per_stage(flags, words):
    assert split_words.layer_split_words(layered(flags), ModelFamily.GPT) == words


def test_a_t5_counts_both_stacks():
    flags = "--encoder-num-layers 1 --decoder-num-layers 3 --dynapipe-layer-to-device 0,1,1,1"
    words = ["--dynapipe-layers-per-stage", "1,3"]
    assert split_words.layer_split_words(layered(flags), ModelFamily.T5) == words


def test_two_ways_to_split_layers_are_one_too_many():
    flags = "--dynapipe-layer-to-device 0,0,1,1 --dynapipe-layers-per-stage 3,1"
    with pytest.raises(ConfigError, match="--dynapipe-layer-to-device or --dynapipe-layers-per-stage, got both"):
        split_words.layer_split_words(layered(flags), ModelFamily.GPT)


def layered(flags: str) -> argparse.Namespace:
    made = arguments.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for name, value in {"num-layers": 4, "encoder-num-layers": 4, "decoder-num-layers": None}.items():
        made.add_argument(f"--{name}", type=int, default=value)
    made.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    made.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    made.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    return made.parse_args(flags.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0,0,1", "the stage of each of the 4 layers, got 3 entries"),
        ("0,0,1,1,1", "got 5 entries"),
        ("a,b,c,d", "as 0,0,1,1, got 'a,b,c,d'"),
        ("1,1,0,0", "in the order in which they run, 0,1 with repetitions"),
        ("0,0,0,0", "in the order in which they run, 0,1"),
        ("0,1,0,1", "in the order in which they run, 0,1"),
    ],
)
def test_layers_to_devices_that_cannot_be(given, said):
    with pytest.raises(ConfigError) as told:
        placement.layers_per_stage(given, layers=4, stages=2, chunks=1)
    assert said in told.value.message


@pytest.mark.parametrize(
    ("given", "nodes", "cores", "look_ahead", "first", "most"),
    [
        (None, 1, 8, 8, 1, 4),  # four ranks leave four cores
        (None, 4, 12, 8, 1, 8),  # never more than can be planned ahead: not 32
        (None, 1, 4, 8, 1, 2),  # a second one takes over where the first hangs
        (None, 3, 4, 8, 1, 3),
        (None, 2, 64, 1, 1, 2),
        (2, 3, 4, 8, 6, 6),
    ],
)
def test_a_job_begins_with_one_planner(monkeypatch, given, nodes, cores, look_ahead, first, most):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(cores)))
    count = placement.planner_count(given, nodes=nodes, look_ahead=look_ahead)
    assert (count.first, count.most) == (first, most)
