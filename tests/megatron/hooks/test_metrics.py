"""DynaPipe's numbers in Megatron's writers, and real lengths in its count of FLOPs."""

import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.hooks import metrics
from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset


class WandB:
    """What stands for Weights & Biases' package: it remembers what is logged."""

    def __init__(self) -> None:
        self.config: dict[str, object] = {}
        self.logged: dict[str, dict[str, float]] = {}
        self.last_step = 0

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.last_step, "Weights & Biases drops what comes out of order"
        self.last_step = step
        self.logged.setdefault(str(step), {}).update({name: float(value) for name, value in values.items()})

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


def run_with_writers(rank: int, world_size: int, argv: list[str]) -> dict:
    from megatron.training import training

    wandb, flops = WandB(), []
    sys.modules["wandb"] = wandb
    consume = training.consume_seqlen_stats_in_iteration

    def consumed() -> tuple:
        result = consume()
        flops.append(list(result))
        return result

    training.consume_seqlen_stats_in_iteration = consumed
    with contextlib.redirect_stdout(io.StringIO()):
        assert run_script(script_of("gpt"), argv) == 0
    return {"logged": wandb.logged, "flops": flops}


def scalars_in(folder: Path) -> dict[str, dict[str, float]]:
    """What TensorBoard shows of a folder: numbers by name, by iteration."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    found: dict[str, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for each in events.Scalars(name):
            found.setdefault(str(each.step), {})[name] = each.value
    return found


def writers_flags(folder: Path) -> str:
    """Flags by which a run writes to `folder`/board and to Weights & Biases."""
    wandb = f"--wandb-project ours --wandb-exp-name this --wandb-save-dir {folder / 'wandb'}"
    return f"--tensorboard-dir {folder / 'board'} {wandb}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def runs(folder) -> list[dict]:
    data = make_dataset(folder / "data", 48)
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --train-iters 4 --log-throughput"
    flags += f" --timing-log-level 2 --log-timers-to-tensorboard {writers_flags(folder)}"
    argv = words("gpt", data, f"{flags} --tensorboard-log-interval 2", report=folder / "report")
    return run_ranks(run_with_writers, 4, {"argv": argv})


def test_both_writers_get_the_numbers_of_every_interval(runs, folder):
    for written in (scalars_in(folder / "board"), runs[3]["logged"]):
        ours = {i: {n: v for n, v in of.items() if n.startswith("dynapipe/")} for i, of in written.items()}
        assert [i for i, of in ours.items() if of] == ["2", "4"]
        for numbers in (ours["2"], ours["4"]):
            assert 0 < numbers["dynapipe/padding efficiency"] <= 1 <= numbers["dynapipe/micro-batches"]
            assert numbers["dynapipe/predicted time (ms)"] > 0 < numbers["dynapipe/measured time (ms)"]
            assert numbers["dynapipe/plan wait (ms)"] >= 0 and 0 <= numbers["dynapipe/bubbles"] < 1


def test_megatrons_timers_get_the_times_of_the_trace(runs, folder):
    scalars = scalars_in(folder / "board")
    names = ("batch-generator", "forward-compute", "backward-compute", "forward-recv", "forward-send", "backward-recv")
    for iteration in ("2", "3", "4"):  # Megatron writes none for the first
        times = {name: value for name, value in scalars[iteration].items() if name.endswith("-time")}
        assert {f"{name}-time" for name in (*names, "backward-send", "forward-backward")} <= times.keys()
        for name in names:
            assert times[f"{name}-time"] > 0, name
        assert times["forward-compute-time"] < times["forward-backward-time"]
        assert times["backward-compute-time"] < times["forward-backward-time"]


def test_the_count_of_flops_takes_real_lengths(runs):
    for run in runs:
        assert run["flops"] == runs[0]["flops"]
        assert len(run["flops"]) == 4
        for tokens, squares in run["flops"]:
            assert 16 <= tokens < 16 * 80, "sixteen samples, unpadded"
            assert tokens < squares


def test_lengths_are_copied_from_pinned_memory(monkeypatch):
    """A copy from other memory would wait for all work of the device."""
    steps = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: steps.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: steps.append((device.type, how)) or tensor)
    monkeypatch.setattr(metrics.training, "update_seqlen_stats_from_cu_seqlens", steps.append, raising=False)
    micro_batches = [SimpleNamespace(input_lengths=[9, 5], pieces=(), share=(1, 0))]
    entry = SimpleNamespace(family=ModelFamily.GPT, micro_batches=micro_batches)
    metrics.count_flops(SimpleNamespace(entry=entry), torch.device("cuda"))
    assert steps[:2] == ["pinned", ("cuda", {"non_blocking": True})] and steps[2].tolist() == [0, 8, 12]


def test_one_tensor_parallel_rank_records_for_all(runs, folder):
    records = {path.name: path.read_text() for path in (folder / "report").glob("rank-*.jsonl")}
    recorded = [name for name, text in records.items() if '"type":"iteration"' in text]
    timelines = [name for name, text in records.items() if '"type":"timeline"' in text]
    assert recorded == ["rank-0.jsonl"]
    assert len(timelines) == 2
