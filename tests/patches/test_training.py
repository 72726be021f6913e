"""Real sources of each version: unpacked, patched, trained and evaluated from plans, reversed; against the plug-in."""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dynapipe.checkout.survey import State, survey
from megatron_dynapipe.tools.patch import change
from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.entry_scripts import COMMON, ROOT, SMALL, train
from tests.helpers.megatron_wheels import VERSIONS, unpack
from tests.helpers.processes import rank_environment
from tests.helpers.random_dataset import make_dataset

BY_HAND = Path(__file__).with_name("pretrain_gpt_by_hand.py")
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
TERMS = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
LAYOUTS = {
    "two stages": "--pipeline-model-parallel-size 2",
    "two tensor ranks": "--tensor-model-parallel-size 2",
    "two stages, slices": "--pipeline-model-parallel-size 2 --dynapipe-slices 16",
    "two tensor ranks, losses of targets": "--tensor-model-parallel-size 2 --dynapipe-loss targets",
    "two stages, losses of targets": "--pipeline-model-parallel-size 2 --dynapipe-loss targets",
    "two stages, half a layer": "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage 2.5,1.5",
    "two stages, virtual ones, half layers": "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage 1.5,1,1,0.5"
    " --num-virtual-stages-per-pipeline-rank 2",
    "two replicas share experts": f"{EXPERTS} {TERMS} --expert-model-parallel-size 2",
    "two stages, half a layer of experts": f"{EXPERTS} --pipeline-model-parallel-size 2"
    " --dynapipe-layers-per-stage 2.5,1.5",
    "a pattern of two stages": "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *-*-*|-*- --num-layers 8",
}
DAILY = "two stages, half a layer"
ITERATIONS = 5
TASKS = ("a task", "another")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", tasks=TASKS)


@pytest.fixture(
    scope="module", params=[*(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS[:-1]), VERSIONS[-1]]
)
def patched(request, tmp_path_factory) -> Iterator[Path]:
    """A checkout made from the wheel, patched; at the end patches are reversed, and it is compared with the wheel."""
    folder = unpack(request.param, tmp_path_factory.mktemp("checkout"))
    before = contents(folder)
    (checkout,) = survey(folder)
    assert request.param in checkout.series.releases and checkout.state is State.RELEASED
    change(folder)
    changed = {name for name, data in contents(folder).items() if before.get(name) != data}
    assert changed == set(checkout.series.files)
    yield folder
    change(folder, reverse=True)
    assert {name: data for name, data in contents(folder).items() if "__pycache__" not in name} == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def values(log: str) -> list[tuple[str, float]]:
    """What evaluations have logged: (name, loss)."""
    return [(name, float(value)) for name, value in re.findall(r"(lm loss[a-z ]*?) value: (\S+)", log)]


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n == DAILY else pytest.mark.slow) for n in LAYOUTS])
def test_a_patched_checkout_trains_and_evaluates_as_the_plug_in_does(layout, patched, plugged_in, data, tmp_path):
    flags = f"{LAYOUTS[layout]} --train-iters {ITERATIONS} --eval-iters 1 --eval-interval {ITERATIONS}"
    losses, expected, recorded = plugged_in(layout, flags)
    last, outputs = run(patched, data, flags, tmp_path, ranks=2)
    assert len(last["losses"]) == ITERATIONS
    assert last["losses"] == pytest.approx(losses, rel=1e-5)
    assert last["consumed"] == 16 * ITERATIONS
    log = "".join(outputs)
    assert f"iteration        {ITERATIONS}/       {ITERATIONS}" in log
    assert "padding efficiency" in log
    assert "slices" not in layout or "samples cut: " in log
    noise = re.compile(
        r"(?<!Syntax)Warning(?!: Overriding default)|DEPRECATED|RNG state|RerunState|Apex|OptimizerConfig"
    )
    assert [line for line in log.splitlines() if noise.search(line)] == [], "start-up messages are filtered"
    assert {name for name, _ in expected} == {"lm loss", *(f"lm loss {task}" for task in TASKS)}
    assert [name for name, _ in values(outputs[-1])] == [name for name, _ in expected]
    assert [value for _, value in values(outputs[-1])] == pytest.approx([value for _, value in expected], rel=1e-4)
    own = read_run(tmp_path / "report").evaluations["test"]
    assert own.keys() == recorded.keys()
    for name, evaluated in own.items():
        assert evaluated == pytest.approx(recorded[name], rel=1e-5)


@pytest.fixture(scope="module")
def plugged_in(data, tmp_path_factory) -> Callable[[str, str], tuple[dict, list, dict]]:
    """Trains with the plug-in, once for each layout: losses by iteration, and what evaluations logged and recorded."""

    @functools.cache
    def trained(layout: str, flags: str) -> tuple[dict, list, dict]:
        report = tmp_path_factory.mktemp("report")
        last = train("gpt", data, flags, ranks=2, report=report)[-1]
        return last["losses"], values(last["stdout"]), read_run(report).evaluations["test"]

    return trained


def run(checkout: Path, data: Path, flags: str, folder: Path, *, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Train by hand: the last rank's losses by iteration and count of samples, and every rank's output."""
    folder.mkdir(exist_ok=True)
    spec = "--spec tests.helpers.stock_megatron LOCAL_STACK" if "pattern" in flags else ""
    flags = f"{SMALL['gpt']} {COMMON} --use-dynapipe --dynapipe-data {data} {spec} {flags}"
    outputs = launch(BY_HAND, checkout, flags, folder, ranks=ranks)
    return json.loads((folder / f"losses-{ranks - 1}.json").read_text()), outputs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resumed_with_another_number_of_replicas(patched, data, tmp_path):
    flags = "--tokens-per-global-batch 500 --train-iters 4 --override-opt-param-scheduler"
    whole, _ = run(patched, data, flags, tmp_path / "whole", ranks=2)
    until = f"{flags} --exit-interval 2 --save {tmp_path / 'saved'} --save-interval 2"
    first, _ = run(patched, data, until, tmp_path / "first", ranks=2)
    rest, _ = run(patched, data, f"{flags} --load {tmp_path / 'saved'}", tmp_path / "rest", ranks=1)
    assert first["losses"] | rest["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert list(rest["losses"]) == ["3", "4"]
    assert 0 < first["consumed"] < rest["consumed"] == whole["consumed"] != 4 * 16


@pytest.mark.slow
def test_a_checkout_that_was_merged_with_changes_trains(data, tmp_path):
    folder = unpack(VERSIONS[-1], tmp_path / "checkout")
    path = folder / "megatron" / "training" / "training.py"
    path.write_text(path.read_text().replace('"""Pretrain utilities."""', 'print("a change of ours")', 1))
    change(folder, merge=True)
    flags = f"{SMALL['gpt']} {COMMON} {LAYOUTS['two stages']} --train-iters 2 --use-dynapipe"
    output = "".join(launch(BY_HAND, folder, f"{flags} --dynapipe-data {data}", tmp_path))
    assert "a change of ours" in output and "iteration        2/       2" in output


@pytest.mark.slow
def test_a_staged_t5_trains_in_a_patched_checkout(patched, data, tmp_path):
    """With this project's entry script beside it: its own hooks and the patches do not get in each other's way."""
    flags = f"{SMALL['t5']} {COMMON} {LAYOUTS['two stages']} --train-iters 2 --use-dynapipe"
    outputs = launch(ROOT / "pretrain_t5_multitask.py", patched, f"{flags} --dynapipe-data {data}", tmp_path)
    assert "iteration        2/       2" in "".join(outputs)


@pytest.mark.parametrize("patched", VERSIONS[-1:], indirect=True)
def test_what_keeps_a_patched_run_from_starting_is_one_line(patched, data, tmp_path):
    flags = f"{SMALL['gpt']} {COMMON} --train-iters 2 --use-dynapipe --dynapipe-data {data}"
    (said,) = launch(BY_HAND, patched, f"{flags} --dynapipe-lookahead 0", tmp_path, ranks=1, status=2)
    error, hint = said.strip().splitlines()[-2:]
    assert error == "error: argument --dynapipe-lookahead: expected a number from 1 to 1000000, got 0"
    assert hint.startswith("hint: ")


@pytest.mark.slow
@pytest.mark.parametrize("patched", VERSIONS[-1:], indirect=True)
def test_a_patched_run_without_a_gpu_is_told_how_to_start(patched, data, tmp_path):
    """Upstream's script does not enable the CPU platform."""
    flags = f"{SMALL['gpt']} {COMMON} --train-iters 2 --use-dynapipe --dynapipe-data {data}"
    script = tmp_path / "pretrain.py"
    script.write_text("from megatron.training.arguments import parse_and_validate_args\nparse_and_validate_args()\n")
    (said,) = launch(script, patched, flags, tmp_path, ranks=1, status=2)
    error, hint = said.strip().splitlines()[-2:]
    assert error == "error: expected a CUDA device, found none"
    assert "torchrun --nproc-per-node 2 -m megatron_dynapipe.cpu pretrain_gpt.py" in hint


@pytest.mark.slow
def test_a_checkout_without_a_call_of_the_patches_is_refused(patched, data, tmp_path):
    """As a merge by hand may leave it: the run would not be closed."""
    path = patched / "megatron" / "training" / "training.py"
    text = path.read_text()
    head, line, tail = text.rpartition("    dynapipe.finish()\n")
    assert line
    path.write_text(head + tail)
    try:
        flags = f"{SMALL['gpt']} {COMMON} --train-iters 2 --use-dynapipe --dynapipe-data {data}"
        (said,) = launch(BY_HAND, patched, flags, tmp_path, ranks=1, status=2)
    finally:
        path.write_text(text)
    assert "lacks calls of the patches: pretrain() of megatron.training.training calls no finish" in said


def launch(
    script: Path | str,
    checkout: Path,
    flags: str,
    folder: Path,
    *,
    ranks: int = 2,
    status: int = 0,
    deadline_s: float = 180,
) -> list[str]:
    """Run a script, or words for Python, on ranks whose Megatron is the checkout's; each rank's output."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Beside the checkout, for all ranks of its runs: each takes three seconds to compile what it imports of Megatron.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(checkout.with_name("compiled"))}
    common = {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"} | compiled
    command = [sys.executable, *str(script).split(), *flags.split(), "--dynapipe-report-dir", str(folder / "report")]
    started = []
    for rank in range(ranks):
        variables = rank_environment(rank, ranks, rendezvous.port) | {"LOSSES": str(folder / f"losses-{rank}.json")}
        log = (folder / f"rank-{rank}.log").open("w")
        process = subprocess.Popen(
            command, cwd=checkout, env=os.environ | common | variables, stdout=log, stderr=subprocess.STDOUT
        )
        started.append((process, log))
    try:
        codes = [process.wait(deadline_s) for process, _ in started]
    finally:
        for process, log in started:
            process.kill()
            process.wait()
            log.close()
    outputs = [(folder / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert codes == [status] * ranks, "\n".join(output[-3000:] for output in outputs)
    return outputs
