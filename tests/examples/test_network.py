"""Two nodes for real: network namespaces with own addresses run `two_nodes.sh`; the link between them is cut."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.namespaces import ADDRESSES, inside, ip, two_nodes
from tests.helpers.random_dataset import make_dataset

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+|nan)")
FLAGS = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--global-batch-size 16 --eval-iters 0 --train-iters 12 --dynapipe-calibrate 0 --dynapipe-lookahead 2 "
    "--dynapipe-timeout-s 100"
)
START_S, END_S, CUT_S = 200, 150, 5


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    with two_nodes() as names:
        yield names


def start(nodes: tuple[str, str], data: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The quick start's command on each node, with a tiny model."""
    folder.mkdir()
    environment = os.environ | {
        "PYTHON": sys.executable,
        "GPUS_PER_NODE": "1",
        "SCRIPT": "pretrain_t5_multitask.py",
        "CONFIG": "configs/demo_t5.yaml",
        "GLOO_SOCKET_IFNAME": "link0",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank, node in enumerate(nodes):
        words = [*inside(node), "bash", "examples/two_nodes.sh", ADDRESSES[0], str(rank), *FLAGS.split()]
        words += ["--dynapipe-data", str(data), "--dynapipe-report-dir", str(folder / f"report-{rank}")]
        with (folder / f"log-{rank}").open("w") as log:
            processes.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT, env=environment))
    return processes


def losses(folder: Path) -> dict[int, float]:
    text = "".join(log.read_text() for log in folder.glob("log-*"))
    return {int(number): float(loss) for number, loss in LINE.findall(text)}


def run(nodes: tuple[str, str], data: Path, folder: Path, *, cut: bool) -> dict[int, float]:
    """Train to the end; the losses."""
    processes = start(nodes, data, folder)
    try:
        deadline = time.monotonic() + START_S
        while max(losses(folder), default=0) < 4:
            assert time.monotonic() < deadline, (folder / "log-0").read_text()[-3000:]
            assert all(process.poll() is None for process in processes), (folder / "log-0").read_text()[-3000:]
            time.sleep(0.05)
        if cut:
            ip(f"-n {nodes[1]} link set link0 down")
            time.sleep(CUT_S)
            ip(f"-n {nodes[1]} link set link0 up")
        for process in processes:
            assert process.wait(END_S) == 0, (folder / "log-0").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return losses(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_over_a_link_that_is_cut_and_comes_back(nodes: tuple[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_dataset(data)
    undisturbed = run(nodes, data, tmp_path / "undisturbed", cut=False)
    assert sorted(undisturbed) == list(range(1, 13))
    for node in range(2):  # the second node has a planner of its own, which reads the first one's store
        assert (tmp_path / "undisturbed" / f"report-{node}" / f"planner-{node}.log").exists()
    assert run(nodes, data, tmp_path / "cut", cut=True) == pytest.approx(undisturbed, rel=1e-5)
