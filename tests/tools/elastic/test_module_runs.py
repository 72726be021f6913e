"""A user's own model under torchrun: the layout of the ranks that are there, and runs that go on where others left."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from torch import nn

from megatron_dynapipe import CutPoint, Pipeline, split_model
from megatron_dynapipe.errors import ConfigError, CostModelError, DataError
from megatron_dynapipe.tools.elastic import layout as elastic_layout
from megatron_dynapipe.tools.elastic.layout import ModuleLayout, layout_for
from megatron_dynapipe.tools.elastic.run import ElasticRun
from megatron_dynapipe.tools.tuning import tune_segments
from tests.helpers.processes import run_ranks
from tests.modules.test_pipeline import SPLITS, step_of, toy, toy_batch, toy_loss, toy_pipeline, whole_losses
from tests.modules.test_planning import costs_of
from tests.store.servers import free_port
from tests.tools.elastic.agents import DEADLINE_S, Nodes, kill

COSTS = costs_of(1, 1, 3, 1)
LENGTHS = [[9, 33, 30, 60, 12, 8, 50, 17]]
LIMIT = 10**9
SCRIPT = Path(__file__).parents[3] / "examples" / "elastic_module.py"
LINE = re.compile(r"iteration (\d+) of (\{.*?\}): loss ([0-9.]+)")
ITERATIONS = 60


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that nothing started."""
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_layout_is_the_best_of_tune(alone: None, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    layout = layout_for(COSTS, LENGTHS, memory_limit_bytes=LIMIT)
    batches = [elastic_layout.batch_of_positions(each, 0) for each in LENGTHS]
    best = tune_segments(COSTS, batches, devices=ranks, memory_limit_bytes=LIMIT).layouts[0]
    assert (layout.replicas, layout.stages) == (best.data_parallel, best.pipeline_parallel)
    assert layout.predicted_ms == best.predicted_ms
    assert tuple(map(layout.stage_of.count, range(layout.stages))) == best.layers_per_stage


def test_split_points_are_those_between_stages(alone: None) -> None:
    batches = [elastic_layout.batch_of_positions(lengths, 0) for lengths in LENGTHS]
    found = tune_segments(COSTS, batches, devices=1, memory_limit_bytes=LIMIT).layouts[0]
    changed = msgspec.structs.replace(found, pipeline_parallel=3, layers_per_stage=(2, 1, 1))
    layout = ModuleLayout.of(changed, COSTS)
    assert layout.stage_of == (0, 0, 1, 2) and layout.split_points == ("cuts.1", "cuts.2")
    assert ModuleLayout.of(found, COSTS).split_points == ()


def test_costs_that_cannot_be_read_are_named(alone: None) -> None:
    with pytest.raises(CostModelError, match="cannot read the cost model /nowhere"):
        layout_for("/nowhere", LENGTHS, memory_limit_bytes=LIMIT)


def layout_or_error(rank: int, world_size: int, lengths: list[list[int]]) -> Any:
    try:
        found = layout_for(COSTS, lengths if rank == 0 else [], memory_limit_bytes=LIMIT, timeout_s=60)
        return found.replicas, found.stages
    except ConfigError as error:
        return error.message


def test_rank_0_chooses_for_all_and_fails_for_all() -> None:
    first, other = run_ranks(layout_or_error, 2, {"lengths": LENGTHS})
    assert first == other and first[0] * first[1] == 2
    told = run_ranks(layout_or_error, 2, {"lengths": []})
    assert len(set(told)) == 1 and "expected at least one batch" in told[0]


def some_iterations(rank: int, world_size: int, folder: str, stages: int, until: int, notice: int | None) -> Any:
    """Losses of a run's iterations, the exit status with which it left, and what it began with."""
    _, pipeline = toy_pipeline(replicas=world_size // stages, split_points=SPLITS[stages])
    run = ElasticRun(folder, pipeline, save_every=2, timeout_s=60)
    began, losses, status = run.iteration, dict[int, float](), None
    try:
        for iteration in run.iterations(until):
            losses[iteration] = step_of(pipeline, iteration)
            if iteration == notice and rank == world_size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
    except SystemExit as leaving:
        status = leaving.code
    return {"began": began, "losses": losses, "status": status}


def test_a_run_goes_on_in_another_layout_after_a_notice_to_one_rank(tmp_path: Path) -> None:
    folder, expected = tmp_path / "run", whole_losses(6)
    launched = {"TORCHELASTIC_RUN_ID": "run"}
    starts = [(4, 2, 0, 1), (2, 2, 1, 4), (1, 1, 4, None)]  # ranks, stages, goes on at, notice after
    for ranks, stages, began, notice in starts:
        arguments = {"folder": str(folder), "stages": stages, "until": 6, "notice": notice and notice - 1}
        for found in run_ranks(some_iterations, ranks, arguments, environment=launched):
            end = 6 if notice is None else notice
            assert found["began"] == began and found["status"] == (None if notice is None else 75)
            assert list(found["losses"]) == list(range(began, end))
            assert list(found["losses"].values()) == pytest.approx(expected[began:end], abs=1e-5)
        (folder / f"iteration_{end:07d}_best").mkdir(exist_ok=True)  # the user's
        assert [path.name for path in folder.glob("iteration_*[0-9]")] == [f"iteration_{end:07d}"], "the last one alone"
    assert len(list(folder.glob("*_best"))) == 3


def another_model(rank: int, world_size: int, folder: str) -> list[str]:
    """What is said of a checkpoint that the whole toy saved, by a model that has more, and by one that has less."""
    import torch

    said = []
    _, pipeline = toy_pipeline(split_points=SPLITS[2])
    ElasticRun(folder, pipeline, save_every=0).save()
    for change in (1, -1):
        model = changed_toy(change)
        part = split_model(model, toy_batch(2, 5, 0), split_points=SPLITS[2])
        other = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=0.1), toy_loss)
        with pytest.raises(DataError) as refused:
            ElasticRun(folder, other)
        said.append(str(refused.value))
    return said


def changed_toy(change: int) -> Any:
    """The toy with one layer more or less."""
    model = toy()
    if change > 0:
        model.layers.append(nn.Linear(8, 8))
        model.cuts.append(CutPoint())
    else:
        del model.layers[-1], model.cuts[-1]
    return model


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    for more, less in run_ranks(another_model, 2, {"folder": str(tmp_path / "run")}):
        assert "cannot read the checkpoint" in more
        assert "which also holds layers." in less


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the example's model."""
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    subprocess.run([sys.executable, SCRIPT, "--profile", path], check=True, timeout=DEADLINE_S)
    return path


def losses_of(text: str) -> dict[int, tuple[str, float]]:
    """By iteration, the layout that last trained it and its loss."""
    return {int(number): (layout, float(loss)) for number, layout, loss in LINE.findall(text)}


def trained(nodes: Nodes) -> dict[int, tuple[str, float]]:
    """`losses_of` two nodes, in order; the second has gone when the first trains an iteration again."""
    return dict(sorted((losses_of(nodes.said(1)) | losses_of(nodes.said(0))).items()))


def undisturbed(costs: Path, folder: Path) -> dict[int, tuple[str, float]]:
    """The same run in one process, without torchrun."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, SCRIPT, "--costs", costs, "--save", folder, "--iterations", str(ITERATIONS)]
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return losses_of(done.stdout)


def script_of(costs: Path, folder: Path, iterations: int = ITERATIONS) -> list[str]:
    return [str(SCRIPT), "--costs", str(costs), "--save", str(folder / "run"), "--iterations", str(iterations)]


def assert_as_undisturbed(found: dict[int, tuple[str, float]], costs: Path, folder: Path) -> None:
    """Every iteration has its loss, and the last ones are one rank's."""
    assert list(found) == list(range(ITERATIONS))
    layouts = [layout for layout, _ in found.values()]
    assert layouts[0] != layouts[-1] == "{'replicas': 1, 'stages': 1}"
    expected = undisturbed(costs, folder / "undisturbed")
    for iteration, (_, loss) in found.items():
        assert loss == pytest.approx(expected[iteration][1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notice", [True, False])
def test_the_example_goes_on_when_a_node_is_lost(costs: Path, tmp_path: Path, notice: bool) -> None:
    with Nodes(tmp_path, free_port(), most=2, script=script_of(costs, tmp_path)) as nodes:
        stays, lost = nodes.start(), nodes.start()
        nodes.until(lambda: len(trained(nodes)) >= 3, "three iterations of two ranks")
        if notice:
            lost.send_signal(signal.SIGTERM)
        else:
            kill(lost)
        assert stays.wait(DEADLINE_S) == 0, nodes.said(0)[-3000:]
        found = trained(nodes)
    assert_as_undisturbed(found, costs, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_do_not_outlive_a_killed_agent(costs: Path, tmp_path: Path) -> None:
    """They went on to save, beside the ranks of the next agent."""
    with Nodes(tmp_path, free_port(), most=1, script=script_of(costs, tmp_path, 100_000)) as nodes:
        agent = nodes.start()
        nodes.until(lambda: len(losses_of(nodes.said(0))) > 3, "three iterations")
        ranks = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        assert not psutil.wait_procs(ranks, timeout=10)[1]
