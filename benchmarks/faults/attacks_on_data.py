"""Attacks on data: files that change, that are another run's, that differ between nodes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ground import FLAGS, ITERATIONS, ROOT, START_S, Ground, Outcome, Run, attack, command


@attack
def data_overwritten(ground: Ground) -> Outcome:
    """`train.bin` is overwritten in place while a run reads it."""
    data = ground.copy_of_data()
    run = Run(ground, data=data)
    run.at(3)
    content = (data / "train.bin").read_bytes()
    with (data / "train.bin").open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in content))
    return run.outcome(ground, r"the tokens of sample \d+ are not those that were written", status=1)


@attack
def data_without_checksums_overwritten(ground: Ground) -> Outcome:
    """The same of a dataset that has no checksums, as one that Megatron wrote."""
    data = ground.copy_of_data()
    for path in data.glob("*.crc32.npy"):
        path.unlink()
    run = Run(ground, "--dynapipe-lookahead 2", data=data)
    run.at(3)
    with (data / "train.bin").open("r+b") as file:
        file.write(b"\1\1" * 1000)
    # Iterations that were prepared before it was noticed may differ: up to a second's.
    return run.outcome(
        ground, r"expected the file as it was opened, it has been changed since", status=1, with_losses=False
    )


@attack
def data_of_another_run(ground: Ground) -> Outcome:
    """A checkpoint is resumed on other data of the same lengths."""
    first = Run(ground, f"--exit-interval 4 --save {ground.folder / 'other'} --save-interval 4")
    first.end(status=0)
    data = changed(ground)
    run = Run(ground, f"--load {ground.folder / 'other'}", data=data)
    return run.outcome(ground, r"expected the data that the checkpoint \S+ was trained on", status=1, with_losses=False)


@attack
def vocabulary_of_another_run(ground: Ground) -> Outcome:
    """A checkpoint of a vocabulary of 4096 is resumed on a dataset of 300."""
    first = Run(ground, f"--exit-interval 2 --save {ground.folder / 'large'} --save-interval 2")
    first.end(status=0)
    rows = ground.fresh() / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"task": "a", "input": "number {n} of many", "target": "{n * n}"}}\n' for n in range(400))
    )
    small = rows.parent / "small"
    command("data", "prepare", rows, "--output", small, "--vocabulary-size", "300", status=0, pattern="vocabulary 300")
    run = Run(ground, f"--load {ground.folder / 'large'}", data=small)
    pattern = r"expected the model and vocabulary of the checkpoint \S+, got vocabulary size 300 \(was 4096\)"
    return run.outcome(ground, pattern, status=1, with_losses=False)


@attack
def data_differs_between_nodes(ground: Ground) -> Outcome:
    """Two nodes have datasets of equal lengths and other tokens."""
    datasets = [("--dynapipe-data", str(ground.data)), ("--dynapipe-data", str(changed(ground)))]
    return two_nodes(ground, datasets, r"expected the same dataset on all nodes: the digest of [\w.]+")


@attack
def settings_differ_between_nodes(ground: Ground) -> Outcome:
    """Two nodes are started with other seeds."""
    words = [("--dynapipe-data", str(ground.data), "--seed", seed) for seed in ("1", "2")]
    return two_nodes(ground, words, r"expected the same settings on all ranks: splits.train.sampler.seed[^\n]*")


def two_nodes(ground: Ground, words: Sequence[Sequence[str]], pattern: str) -> Outcome:
    """A run of two nodes of a rank each, on this machine, that is to be refused."""
    folder, began, processes = ground.fresh(), time.monotonic(), []
    for node, more in enumerate(words):
        launcher = ("torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
        run = [
            *(sys.executable, "-m", *launcher, "--master-addr", "127.0.0.1", "--master-port", "29417"),
            *(str(ROOT / "pretrain_t5_multitask.py"), "--dynapipe-config", str(ROOT / "configs" / "demo_t5.yaml")),
            *("--dynapipe-report-dir", str(folder / f"report-{node}"), *more),
            *f"{FLAGS} --train-iters {ITERATIONS}".split(),
        ]
        with (folder / f"log-{node}").open("w") as log:
            processes.append(subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    statuses = [process.wait(START_S) for process in processes]
    text = "".join((folder / f"log-{node}").read_text() for node in range(2))
    found = re.search(pattern, text)
    return Outcome(
        said=found[0] if found else text[-200:],
        seconds=time.monotonic() - began,
        status=statuses[0],
        trouble="" if found and all(statuses) else "expected both nodes to refuse",
    )


def changed(ground: Ground) -> Path:
    """A dataset of the same lengths with other tokens, as whole as the first."""
    data = ground.copy_of_data()
    content = bytearray((data / "train.bin").read_bytes())
    for place in range(0, len(content), 2):  # two bytes a token, none of them special
        content[place] ^= 4
    (data / "train.bin").write_bytes(content)
    (data / "train.crc32.npy").unlink(missing_ok=True)
    manifest = data / ("manifest.json" if (data / "manifest.json").exists() else "meta.json")
    meta = json.loads(manifest.read_text())
    meta.pop("files", None)
    manifest.write_text(json.dumps(meta))
    return data
