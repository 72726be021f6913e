"""The launch scripts of examples/: what they would start, seen through commands that only print their arguments."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import commands
from tests.helpers.commands import ROOT


def run(script: str, *words: str, bin_folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    fake = bin_folder / "python"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (bin_folder / "srun").write_text(
        '#!/bin/sh\nshift\nwhile [ "${1#--container}" != "$1" ]; do shift; done\nexec "$@"\n'
    )
    (bin_folder / "scontrol").write_text("#!/bin/sh\necho node7\nsleep 0.2\nexec echo node8\n")
    for tool in bin_folder.iterdir():
        tool.chmod(0o755)
    environment = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": str(fake), **environment}
    return commands.run("bash", f"examples/{script}", *words, status=None, **environment)


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_two_nodes_meet_at_the_first(tmp_path):
    done = run("two_nodes.sh", "10.0.0.1", "1", "--train-iters", "5", bin_folder=tmp_path)
    words = done.stdout.splitlines()
    assert (value(words, "--nnodes"), value(words, "--node-rank")) == ("2", "1")
    assert value(words, "--master-addr") == value(words, "--dynapipe-store-bind") == "10.0.0.1"
    assert (ROOT / value(words, "--dynapipe-config")).exists()
    assert words[-2:] == ["--train-iters", "5"]


def test_slurm_starts_one_torchrun_per_node(tmp_path):
    config = "configs/t5_11b_24+24layers.yaml"
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "5"}
    done = run("slurm/train.sbatch", "pretrain_t5_multitask.py", config, "--lr", "1", bin_folder=tmp_path, **job)
    words = done.stdout.splitlines()
    assert value(words, "--rdzv-endpoint").startswith("node7:")
    assert value(words, "--dynapipe-store-bind") == "node7"
    assert value(words, "--nnodes") == "2"
    assert value(words, "--dynapipe-config") == config
    assert value(words, "--save") == value(words, "--load") == "checkpoints/dynapipe"
    assert words[-2:] == ["--lr", "1"]
    job |= {"SAVE": "/scratch/a", "CONTAINER": "image.sqsh", "SLURM_JOB_NAME": "b"}
    done = run("slurm/train.sbatch", "pretrain_t5_multitask.py", config, bin_folder=tmp_path, **job)
    assert "--save\n/scratch/a\n" in done.stdout


def test_a_missing_package_is_told(tmp_path):
    (tmp_path / "peft.py").write_text("raise ModuleNotFoundError")
    done = commands.run(sys.executable, "examples/lora_module.py", status=1, PYTHONPATH=str(tmp_path))
    assert done.stderr == "error: expected the package peft, found none\nhint: pip install peft\n"


def test_missing_arguments_are_told(tmp_path):
    for script in ("two_nodes.sh", "slurm/train.sbatch"):
        done = run(script, bin_folder=tmp_path)
        assert done.returncode == 2 and "usage:" in done.stderr
