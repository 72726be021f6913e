"""A folder in which the documents' commands run as they stand: a checkout's files, in which only sizes are small."""

import json
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.commands import ROOT
from tests.helpers.random_dataset import VOCABULARY, make_dataset

PROGRAM = "megatron-dynapipe"
MODELS = {"flan-t5-large": "t5-v1.1", "Llama-3.2-1B": "llama"}
"""Folders of `models` and what small models lie there."""
DEMOS = ("demo_gpt.yaml", "demo_t5.yaml")

_TRAINING = {"train-iters": 2, "eval-iters": 0, "dynapipe-calibrate": 0, "lr-warmup-fraction": 0, "lr-warmup-iters": 0}
_MODEL = {
    "num-layers": 4,
    "encoder-num-layers": 2,
    "decoder-num-layers": 2,
    "hidden-size": 64,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "ffn-hidden-size": 96,
    "seq-length": 128,
    "decoder-seq-length": 64,
    "max-position-embeddings": 128,
    "global-batch-size": 16,
    "tensor-model-parallel-size": 1,
}
"""What the files of `configs/` have instead of their own numbers, where they have such a key."""
_CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
_SLURM = {"sbatch": 'shift 2\nexec bash "$@"', "srun": 'shift\nexec "$@"', "scontrol": "echo 127.0.0.1"}


def make_workspace(folder: Path) -> dict[str, str]:
    """Fill a folder with what a checkout and its reader have; the environment of commands in it."""
    for name in ("benchmarks", "examples", "pretrain_gpt_multitask.py", "pretrain_t5_multitask.py"):
        (folder / name).symlink_to(ROOT / name)
    _small_run_files(folder / "configs")
    make_dataset(folder / ".demo" / "data")
    make_dataset(folder / "data" / "mixture")
    _readers_own(folder)
    programs = folder / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    lines = {
        PROGRAM: f'exec {python} -m megatron_dynapipe "$@"',
        "python": f'exec {python} "$@"',
        "torchrun": f'exec {python} -m torch.distributed.run "$@"',
    }
    for name, line in (lines | _SLURM).items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    slurm = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1"}
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return {
        "PATH": f"{programs}:/usr/bin:/bin",
        "MASTER_PORT": port,
        "PET_MASTER_PORT": port,
        "GPUS_PER_NODE": "2",
        **slurm,
        **variables,
    }


def run_text(text: str, folder: Path, environment: dict[str, str]) -> str:
    """Run it in a shell that stops at the first failure; its stdout."""
    bash = shutil.which("bash")
    assert bash is not None
    words = [bash, "-euo", "pipefail", "-c", text]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _small_run_files(folder: Path) -> None:
    folder.mkdir()
    for name in ("clusters", "data"):
        (folder / name).symlink_to(ROOT / "configs" / name)
    for file in (ROOT / "configs").glob("*.yaml"):
        keys: dict[str, Any] = yaml.safe_load(file.read_text())
        small = _TRAINING | ({} if file.name in DEMOS else _MODEL)
        keys |= {name: value for name, value in small.items() if name in keys} | {"dynapipe-calibrate": 0}
        if "pipeline-model-parallel-size" in keys:
            keys["pipeline-model-parallel-size"] = min(2, keys["pipeline-model-parallel-size"])
        (folder / file.name).write_text(yaml.safe_dump(keys))


def _readers_own(folder: Path) -> None:
    """The tokenizer, task files, batches and HuggingFace model that the README's reader has."""
    import pyarrow
    from pyarrow import parquet
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from tests.tools.conversion.models import configs, make, write

    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "mixture" / "tokenizer")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # the dataset's takes single words
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(folder / "TOKENIZER")
    sums = [{"question": f"w{n} w{n + 1}", "answer": f"w{n + 2}"} for n in range(3, 103)]
    (folder / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in sums))
    turns = [{"role": "user", "content": "w5 w6 "}, {"role": "assistant", "content": "w7"}]
    chats = [{"messages": [{**turn, "content": f"w{n} {turn['content']}"} for turn in turns]} for n in range(3, 203)]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in chats))
    parquet.write_table(pyarrow.table({"messages": [turns] * 100}), folder / "chats.parquet")
    batch = {"id": "first", "input": [900, 40, 200, 31, 600, 77], "target": [100, 3, 20, 8, 60, 9]}
    (folder / "BATCHES.json").write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [batch]}))

    for name, kind in MODELS.items():
        config = configs()[kind]
        config.vocab_size, config.max_position_embeddings = VOCABULARY, 256
        write(make(config), folder / "models" / name)
        tokenizer.save_pretrained(folder / "models" / name)
