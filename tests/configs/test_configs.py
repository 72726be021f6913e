"""Run files of configs/ and benchmarks pass Megatron's validation, and plan batches that fit the devices they name."""

import dataclasses
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml

from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.config import read_cluster
from megatron_dynapipe.core.plan import IterationPlan
from tests.core.planner_cases import of_lengths
from tests.helpers.benchmark_data import A100_COSTS, flan_like_batches
from tests.helpers.processes import run_ranks
from tests.helpers.simulated_device import DeviceMemoryError, DeviceStallError, Job, check

ROOT = Path(__file__).parents[2]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "benchmarks" / "throughput").glob("gpu_*.yaml")])
RUN_FILES = [path for path in CONFIGS if path.parent.name == "configs"]
CLUSTERS = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))

GPUS = {
    "gpu_gpt": 1,
    "gpu_llama": 1,
    "gpu_t5": 1,
    "one_gpu_gpt": 1,
    "one_gpu_llama": 1,
    "one_gpu_qwen": 1,
    "one_gpu_t5": 1,
    "one_gpu_t5_v1_1": 1,
    "demo_experts": 2,
    "demo_gpt": 2,
    "demo_t5": 2,
    "gpt_6.7b_16layers": 4,
    "t5_11b_12+12layers": 4,
    "gpt_6.7b_32layers": 8,
    "llama_like_8b": 8,
    "qwen_like_7b": 8,
    "t5_11b_24+24layers": 8,
    "t5_v1_1_xl": 8,
    "t5_v1_1_xxl": 8,
    "gpt_13b_40layers": 16,
    "qwen3_30b_a3b": 16,
    "t5_11b_48+48layers": 16,
    "gpt_175b_16layers": 32,
    "t5_11b_96+96layers": 32,
    "t5_ul2_20b": 32,
}
CLUSTER = {"qwen3_30b_a3b": "h100_80gb", "gpu_llama": "h100_80gb"}
"""Of run files that devices of 40 GB are too small for."""
DEVICE_MB = {"a100_40gb": 40_000, "a100_80gb": 80_000, "h100_80gb": 80_000, "h200_141gb": 141_000}
DEVICE_MB |= {"b200_180gb": 180_000, "gb200_186gb": 186_000}


def family(path: Path) -> str:
    return "t5" if "t5" in path.stem else "gpt"


def cluster(path: Path) -> Path:
    return ROOT / "configs" / "clusters" / f"{CLUSTER.get(path.stem, 'a100_40gb')}.yaml"


def batches(kind: str, *longest: int, share: int = 1) -> list[dict]:
    """A global batch of a FLAN-like mixture for each maximum length, or the first of so many shares of it."""
    whole = [flan_like_batches()[f"{kind}-s{length}-t65536-b0"] for length in longest]
    lengths = ("input", "target")
    return [batch | {key: batch[key][: len(batch[key]) // share] for key in lengths if key in batch} for batch in whole]


def parse_and_plan_all(*, rank: int, world_size: int, cases: list[dict]) -> list[dict]:
    return [parse_and_plan(**case) for case in cases]


def parse_and_plan(config: str, gpus: int, cluster: str, data: str, batches: list[dict]) -> dict:
    """On a forked rank: the run file as torchrun would start it on `gpus` ranks, and plans of the batches."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training import global_vars

    from megatron_dynapipe.choosing.planners import planner_of
    from megatron_dynapipe.config import expand
    from megatron_dynapipe.core.orders import ScheduleSettings
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.megatron.entry.bootstrap import environment
    from megatron_dynapipe.megatron.flags import command_line, from_megatron

    os.environ |= {"WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(min(gpus, 8)), "RANK": "0"}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # what Megatron asserts with tensor parallelism
    argv = ["--dynapipe-config", config, "--dynapipe-data", data]
    if gpus > 2:
        argv += ["--dynapipe-cluster", cluster]
    kind = ModelFamily("t5" if "t5" in Path(config).stem else "gpt")
    global_vars.destroy_global_vars()  # of the run file before
    unset_num_microbatches_calculator()
    args, run = command_line.parse(kind, expand(argv))
    if gpus > 2:
        queues = environment(tensor_parallel=args.tensor_model_parallel_size, stages=2, capability=9, environ={})
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues["CUDA_DEVICE_MAX_CONNECTIONS"]
        run = from_megatron.run_config(args, kind, torch.device("cuda", 0))  # costs of a GPU: there is none here
    inputs = run.inputs
    quickly = msgspec.structs.replace(inputs.planner, schedule=ScheduleSettings(search_evaluations=0))
    planner = planner_of(quickly, inputs.costs.load())
    needed, failures = [], []
    longest = (args.seq_length, (args.decoder_seq_length or 2) - 2)
    for index, batch in enumerate(batches):
        lengths = np.minimum(np.array(batch["input"], np.int32), longest[0])
        targets = np.minimum(np.array(batch.get("target", [0] * len(lengths)), np.int32), longest[1])
        plan = planner.plan(dataclasses.replace(of_lengths(lengths, targets), iteration=index), index)
        assert len(plan.replicas) == args.data_parallel_size
        needed.append(max(plan.model_state_bytes))
        if gpus > 2:
            links = links_of(inputs.planner)
            sharded = links.is_sharded if any(links.sharded) else None
            job = Job(tensor=args.tensor_model_parallel_size, is_sharded=sharded)
            failures += failure_of(plan, job, one_queue=inputs.planner.transfers.ordered_starts)
    return {
        "failures": failures,
        "limit_bytes": inputs.planner.memory_limit_bytes,
        "model_state_bytes": max(needed),
        "sequence_parallel": args.sequence_parallel,
        "dropout": [args.attention_dropout, args.hidden_dropout],
        "links": inputs.planner.network.inter_node_gbps,
        "layout": [args.data_parallel_size, args.tensor_model_parallel_size, args.pipeline_model_parallel_size],
    }


def failure_of(plan: IterationPlan, job: Job, *, one_queue: bool) -> list[str]:
    try:
        check(plan, job, one_queue=one_queue)
    except (DeviceStallError, DeviceMemoryError) as failure:
        return [str(failure)]
    return []


def test_every_config_has_a_number_of_gpus():
    assert sorted(path.stem for path in CONFIGS) == sorted(GPUS)


FIRST_QUARTER = {"longest": (1024,), "share": 4}
WHOLE = {"longest": (512, 1024, 2048), "share": 1}


@pytest.fixture(scope="module", params=[FIRST_QUARTER, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=str)
def planned(data, request) -> dict[str, dict]:
    """What all run files come to, parsed and planned one after another in one process."""
    cases = [
        {"config": str(path), "gpus": GPUS[path.stem], "cluster": str(cluster(path)), "data": str(data)}
        | {"batches": batches(family(path), *request.param["longest"], share=request.param["share"])}
        for path in CONFIGS
    ]
    (results,) = run_ranks(parse_and_plan_all, 1, {"cases": cases}, deadline_s=200)
    return dict(zip((path.stem for path in CONFIGS), results, strict=True))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses_and_its_plans_fit_the_device(path, planned):
    gpus, run = GPUS[path.stem], planned[path.stem]
    assert np.prod(run["layout"]) == gpus
    assert run["model_state_bytes"] < run["limit_bytes"]  # the plans were verified to fit beside it
    assert run["sequence_parallel"] == (run["layout"][1] > 1)
    assert run["dropout"] == [0, 0]
    assert run["failures"] == []  # no device stalls, and none needs more memory of messages than its plan counts
    if gpus > 2:
        file = cluster(path)
        assert run["links"] == {"a100_40gb": 100, "h100_80gb": 400}[file.stem]
        assert run["limit_bytes"] == read_cluster(file).memory_limit_bytes < DEVICE_MB[file.stem] * 10**6
        assert f"{gpus} GPUs" in path.read_text().splitlines()[0]


@pytest.mark.parametrize("command", ["plan", "tune", pytest.param("compare", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_a_run_file_is_all_that_commands_ask_for(path, command, tmp_path, monkeypatch, capsys):
    """No flag of the model is given, and no dataset but that of the demo's own files."""
    monkeypatch.chdir(ROOT)
    lengths = {"input": [90, 60], "target": [20, 10]} if family(path) == "t5" else {"input": [110, 70]}
    batches_file = tmp_path / "batches.json"
    batches_file.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [{"id": "all", **lengths}]}))
    layout = ["--devices", "1", "--workers", "1"] if command == "tune" else ["--pipeline-parallel", "1"]
    argv = [command, "--batches", str(batches_file), "--cost-model", "analytic", "--model-config", str(path), *layout]
    limits = ["--device-memory-limit", "4000000", "--search-evaluations", "0"]
    assert main([*argv, *limits]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_describes_a_device(path):
    cluster = read_cluster(path)
    assert 0.5 < cluster.memory_limit_bytes / 1e6 / DEVICE_MB[path.stem] < 0.95


@pytest.mark.slow
def test_a_tuned_layout_may_follow_a_model_file(data, tmp_path):
    """What `tune --write-config` writes after a model's own file: Megatron takes it, and plans fit."""
    tuned, batches_file = tmp_path / "tuned.yaml", tmp_path / "batches.json"
    batches_file.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches("gpt", 512)}))
    model = ["--model", "gpt", "--layers", "30", "--hidden-size", "4096"]
    argv = ["tune", "--batches", str(batches_file), "--cost-model", str(A100_COSTS["gpt"]), *model]
    argv += ["--devices", "64", "--device-memory-mb", "36000", "--search-evaluations", "20", "--top", "1"]
    assert main([*argv, "--workers", "1", "--write-config", str(tuned)]) == 0
    keys = yaml.safe_load(tuned.read_text())
    both = tmp_path / "gpt_tuned.yaml"
    model_file = yaml.safe_load((ROOT / "configs/gpt_6.7b_32layers.yaml").read_text())
    both.write_text(yaml.safe_dump(model_file | {"num-layers": 30} | keys))
    arguments = {"config": str(both), "gpus": 64, "data": str(data), "batches": batches("gpt", 512)}
    arguments["cluster"] = str(cluster(both))
    ((run,),) = run_ranks(parse_and_plan_all, 1, {"cases": [arguments]}, deadline_s=120)
    tensor, pipeline = keys["tensor-model-parallel-size"], keys["pipeline-model-parallel-size"]
    assert run["layout"] == [64 // (tensor * pipeline), tensor, pipeline]
    assert keys["dynapipe-layers-per-stage"].count(",") == pipeline - 1
    assert run["limit_bytes"] == 36_000_000_000
