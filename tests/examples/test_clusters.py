"""The files for clusters: what they run on each node, run here on one machine as two nodes of one rank each."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from megatron_dynapipe.store.server import find_server_binary
from tests.helpers.commands import ROOT
from tests.helpers.random_dataset import make_dataset

FLAGS = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--global-batch-size 16 --eval-iters 0 --train-iters 4 --save-interval 2 --dynapipe-calibrate 0 "
    "--dynapipe-timeout-s 100"
)
END_S = 400
SECRET = "of-the-cluster"
"""What Kubernetes puts for the key of its secret."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(container: dict, **own: str) -> dict[str, str]:
    """What Kubernetes sets for a container, with values of ours."""
    values: dict[str, str] = {}
    for entry in container["env"]:
        value = own.get(entry["name"], entry.get("value", SECRET))
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], value)
    return os.environ | values


@contextmanager
def running(command: list[str], environments: list[dict[str, str]], folder: Path) -> Iterator[list[subprocess.Popen]]:
    processes = []
    try:
        for node, variables in enumerate(environments):
            with (folder / f"log-{node}").open("w") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=variables))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(command: list[str], environments: list[dict[str, str]], folder: Path) -> str:
    """Run the command on every node; what they printed."""
    with running(command, environments, folder) as nodes:
        for process in nodes:
            assert process.wait(END_S) == 0, (folder / "log-0").read_text()[-3000:]
    return "".join(log.read_text() for log in sorted(folder.glob("log-*")))


def own(tmp_path: Path) -> dict[str, str]:
    """Values of this test for both: a tiny model, here."""
    make_dataset(data := tmp_path / "data")
    (path := tmp_path / "bin").mkdir()
    shutil.copy(find_server_binary(), path / "valkey-server")
    return {
        "SCRIPT": "pretrain_t5_multitask.py",
        "CONFIG": "configs/demo_t5.yaml",
        "SAVE": str(tmp_path / "saved"),
        "FLAGS": f"{FLAGS} --dynapipe-data {data} --dynapipe-report-dir {tmp_path / 'report'}",
        "MASTER_PORT": free_port(),
        "PATH": f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kubernetes(tmp_path: Path) -> None:
    """The store reads its password from the secret, and so does the URL that ranks connect to."""
    text = (ROOT / "examples" / "kubernetes" / "train.yaml").read_text()
    assert SECRET not in text
    service, deployment, jobs = yaml.safe_load_all(text)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    (store,) = deployment["spec"]["template"]["spec"]["containers"]
    (node,) = jobs["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["parallelism"] == node["template"]["spec"]["completions"] == 2
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["env"][0] == {"name": "NODES", "value": "2"}
    port, ours = free_port(), own(tmp_path)
    ours |= {"GPUS": "1", "FIRST": "127.0.0.1"}
    ours["DYNAPIPE_STORE_URL"] = f"redis://:$(PASSWORD)@127.0.0.1:{port}/0"
    (tmp_path / "store").mkdir()
    of_store = environment(store, PORT=port) | {"PATH": ours["PATH"]}
    with running([*store["command"], *store["args"]], [of_store], tmp_path / "store"):
        nodes = [environment(container, **ours) | {"JOB_COMPLETION_INDEX": rank, "PATH": ours["PATH"]} for rank in "01"]
        printed = train([*container["command"], *container["args"]], nodes, tmp_path)
    assert "iteration        4/       4" in printed
    assert SECRET not in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_skypilot(tmp_path: Path) -> None:
    """Rank 0 starts the store, at the first node's address."""
    task = yaml.safe_load((ROOT / "examples" / "skypilot" / "train.yaml").read_text())
    sky = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    sky |= {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "PYTHON": sys.executable}
    ours = own(tmp_path)
    assert set(task["envs"]) <= {*ours, "DATA"}
    variables = os.environ | task["envs"] | sky | ours | {"DATA": str(tmp_path / "data")}
    nodes = [variables | {"SKYPILOT_NODE_RANK": rank} for rank in "01"]
    printed = train(["bash", "-ec", task["run"]], nodes, tmp_path)
    assert "iteration        4/       4" in printed
