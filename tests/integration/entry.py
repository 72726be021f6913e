"""Running the entry scripts on forked ranks, with a small dataset and every iteration's loss.

Ranks are forked with Megatron imported: a run of two starts in a second. Losses are taken from Megatron's own
`training_log`, per step: its log lines average the first two after a start.
"""

import contextlib
import io
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil

from megatron_dynapipe.data.indexed import IndexedWriter
from megatron_dynapipe.data.meta import DatasetMeta, write_meta
from tests.helpers.processes import run_ranks

ROOT = Path(__file__).parents[2]
VOCABULARY = 512

SMALL = {
    "t5": "--encoder-num-layers 2 --decoder-num-layers 2 --seq-length 64 --decoder-seq-length 24",
    "gpt": "--num-layers 4 --seq-length 96",
}
TRAINING = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --max-position-embeddings 96 "
    "--attention-dropout 0 --hidden-dropout 0 --calculate-per-token-loss --lr 1e-3 --lr-decay-style constant "
    "--seed 7 --log-interval 1 --eval-interval 100 --eval-iters 0 --global-batch-size 16"
)
"""Flags of Megatron."""
COMMON = f"{TRAINING} --dynapipe-timeout-s 30"


def make_dataset(folder: Path, samples: int = 64, *, lengths: Sequence[int] = (1, 60), target: int = 20) -> Path:
    """A dataset folder of random tokens with a tokenizer of single characters."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    draw = np.random.default_rng(5)
    for split in ("train", "valid", "test"):
        with IndexedWriter(folder / split, VOCABULARY) as writer:
            for _ in range(samples):
                given, wanted = (draw.integers(3, 40, draw.integers(*ends)) for ends in (lengths, (1, target)))
                writer.add(given.tolist(), wanted.tolist())
        np.save(folder / f"{split}.tasks.npy", np.zeros(samples, np.int16))
    meta = DatasetMeta(
        format="dynapipe-dataset/1",
        source="random tokens",
        tasks=("random",),
        samples=dict.fromkeys(("train", "valid", "test"), samples),
        vocabulary_size=VOCABULARY,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        max_input_length=max(lengths),
        max_target_length=target,
    )
    write_meta(folder, meta)
    return folder


def train(
    family: str,
    data: Path,
    flags: str,
    *,
    ranks: int,
    report: Path,
    status: int = 0,
    kill: str | None = None,
    deadline_s: float = 150,
) -> list[dict]:
    """Run an entry script; per rank its losses by iteration (last stage), stdout and stderr.

    Every rank must end with exit status `status`. At the third iteration the children of rank 0 whose command line
    has the word `kill` are killed.
    """
    words = [
        *SMALL[family].split(),
        *COMMON.split(),
        "--dynapipe-data",
        str(data),
        "--dynapipe-report-dir",
        str(report),
    ]
    arguments = {"script": f"pretrain_{family}_multitask.py", "argv": [*words, *flags.split()], "kill": kill}
    runs = run_ranks(_run_entry, ranks, arguments, deadline_s=deadline_s)
    for rank, run in enumerate(runs):
        assert run["status"] == status, f"rank {rank} ended with {run['status']}:\n{run['stderr'][-3000:]}"
    return runs


def _run_entry(*, rank: int, world_size: int, script: str, argv: list[str], kill: str | None) -> dict:
    """On one rank: the script as `python script argv…` would run it."""

    def after(iteration: int) -> None:
        if kill is not None and rank == 0 and iteration == 3:
            _kill_children(kill)

    losses = record_losses(after)
    sys.argv = [script, *argv]
    output, errors, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code or 0
    return {"status": status, "losses": losses, "stdout": output.getvalue(), "stderr": errors.getvalue()}


def record_losses(after: Callable[[int], None] = lambda _: None) -> dict[str, float]:
    """Losses by iteration, filled on the last stage while Megatron trains in this process."""
    from megatron.training import training

    losses: dict[str, float] = {}
    log = training.training_log

    def logged(loss_dict: dict, total: dict, learning_rate: float, iteration: int, *rest: object, **named: object):
        if "lm loss" in loss_dict:
            losses[str(iteration)] = loss_dict["lm loss"].item()
        after(iteration)
        return log(loss_dict, total, learning_rate, iteration, *rest, **named)

    training.training_log = logged
    return losses


def _kill_children(word: str) -> None:
    victims = [p for p in psutil.Process().children(recursive=True) if word in " ".join(p.cmdline()[:5])]
    assert victims, f"no child process with {word} in its command line"
    for victim in victims:
        victim.kill()
