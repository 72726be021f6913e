"""Megatron's entry script under torchrun's `--max-restarts`, with `--dynapipe-elastic`: lost ranks, nodes that come."""

import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers.entry_scripts import COMMON, ROOT, SMALL, losses, train
from tests.helpers.random_dataset import make_dataset
from tests.store.servers import free_port
from tests.tools.elastic.agents import DEADLINE_S, Nodes, kill

LINE = re.compile(r"iteration +(\d+)/ .*?lm loss: ([0-9.E+-]+)")
LAST = 600
LEARNING_RATE = "1e-5"
"""Small, so that hundreds of iterations do not magnify the rounding of another layout."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, and a checkpoint of the first iteration: Megatron's first weights depend on the layout."""
    folder = tmp_path_factory.mktemp("elastic")
    make_dataset(folder / "data")
    flags = f"--train-iters {LAST} --lr {LEARNING_RATE} --exit-interval 1 --save {folder / 'first'} --save-interval 100"
    train("gpt", folder / "data", flags, ranks=1, report=folder / "report-first")
    return folder


@pytest.fixture(scope="module")
def expected(begun: Path) -> dict[int, float]:
    """Losses of one rank that nobody disturbs."""
    flags = f"--train-iters {LAST} --lr {LEARNING_RATE} --load {begun / 'first'}"
    by_iteration = losses("gpt", begun / "data", flags, ranks=1, report=begun / "report-undisturbed")
    return {int(iteration): loss for iteration, loss in by_iteration.items()}


def script(begun: Path, folder: Path, last: int) -> list[str]:
    words = [str(ROOT / "pretrain_gpt_multitask.py"), *SMALL["gpt"].split(), *COMMON.split()]
    words += ["--dynapipe-data", str(begun / "data"), "--dynapipe-report-dir", str(folder / "report")]
    words += ["--load", str(begun / "first"), "--save", str(folder / "saved")]
    words += ["--save-interval", "1000", "--non-persistent-save-interval", "4", "--non-persistent-ckpt-type", "global"]
    words += f"--lr {LEARNING_RATE} --train-iters {LAST} --exit-interval {last}".split()
    return [*words, "--dynapipe-device", "cpu", "--dynapipe-elastic"]


def trained(nodes: Nodes, *numbers: int) -> dict[int, float]:
    """Losses that nodes have logged as the last rank: the last stage logs, which may be on either."""
    losses_of: dict[int, float] = {}
    for number in numbers:
        for start in nodes.said(number).split("WARNING: one_logger package")[1:]:
            losses_of |= {int(iteration): float(loss) for iteration, loss in LINE.findall(start)}
    return losses_of


def assert_as_undisturbed(nodes: Nodes, expected: dict[int, float], last: int) -> None:
    by_iteration = trained(nodes, 1, 0)
    assert by_iteration == pytest.approx({number: expected[number] for number in range(2, last + 1)}, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_node_s_run_goes_on_in_the_layout_that_fits(begun, expected, tmp_path):
    """By torchrun's plain command: kill -9 of the agent that does not host the rendezvous, and of its rank."""
    with Nodes(tmp_path, free_port(), most=2, script=script(begun, tmp_path, 60)) as nodes:
        stays, lost = nodes.start(), nodes.start()
        nodes.until(
            lambda: max(trained(nodes, 0, 1), default=0) > 9 or stays.poll() is not None, "iterations of two nodes"
        )
        kill(lost)
        assert stays.wait(DEADLINE_S) == 0, nodes.said(0)[-3000:]
        assert re.findall(r"layout: (\d) ranks", nodes.said(0)) == ["2", "1"]
        assert_as_undisturbed(nodes, expected, 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_come_and_leave_on_notice(begun: Path, expected: dict[int, float], tmp_path: Path) -> None:
    with Nodes(tmp_path, free_port(), most=2, script=script(begun, tmp_path, LAST), joins=True) as nodes:
        stays = nodes.start()
        nodes.until(lambda: len(trained(nodes, 0)) > 2, "iterations of one node")
        leaves = nodes.start()
        starts = lambda: re.findall(r"layout: (\d) ranks", nodes.said(0))  # noqa: E731
        nodes.until(lambda: starts()[-1] == "2", "a layout of two")
        alone = len(trained(nodes, 0))
        nodes.until(lambda: len(trained(nodes, 0, 1)) > alone + 3, "iterations of two nodes")
        leaves.send_signal(signal.SIGTERM)
        leaves.wait(DEADLINE_S)
        assert stays.wait(DEADLINE_S) == 0, nodes.said(0)[-3000:]
        assert starts() == ["1", "2", "1"]
        assert_as_undisturbed(nodes, expected, LAST)
        saves = re.findall(r"saving checkpoint at iteration +(\d+) to \S*/saved ", nodes.said(0) + nodes.said(1))
        assert len(set(saves)) == 2, "all saved when the node came, and when it left"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_s_run_goes_on_without_the_flag(begun: Path, expected: dict[int, float], tmp_path: Path) -> None:
    """The same ranks are started again, and load what they saved."""
    shutil.copytree(begun / "first", tmp_path / "saved")
    words = [word for word in script(begun, tmp_path, 30) if word != "--dynapipe-elastic"]
    words += ["--load", str(tmp_path / "saved"), "--save-interval", "4", "--pipeline-model-parallel-size", "2"]
    words += ["--non-persistent-save-interval", "1000"]
    with Nodes(tmp_path, free_port(), most=2, script=words) as nodes:
        first, second = nodes.start(), nodes.start()
        nodes.until(
            lambda: max(trained(nodes, 0, 1), default=0) > 9 or first.poll() is not None, "iterations of two ranks"
        )
        (rank,) = (child for child in psutil.Process(second.pid).children() if "pretrain" in " ".join(child.cmdline()))
        rank.kill()
        assert (first.wait(DEADLINE_S), second.wait(DEADLINE_S)) == (0, 0), nodes.said(0)[-3000:]
        assert "loading distributed checkpoint from" in nodes.said(0)
        assert_as_undisturbed(nodes, expected, 30)
