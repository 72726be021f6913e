"""Mixtures of experts: replicas that share them train what one rank trains.

Every layout begins from the weights that one rank has saved, with an optimizer of its own: Megatron does not divide an
optimizer's states anew over other numbers of experts to a rank.
"""

import functools
import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import entry_scripts
from tests.helpers.processes import RanksFailedError, run_ranks

EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
PLAIN, LABELS = "", "--dynapipe-loss targets"
TERMS = (
    "--moe-z-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.5 0.5"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
)
DENSE_TOO = "--moe-layer-freq ([0]+[1]*3) --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate"
FEW_TOKENS = "--tokens-per-global-batch 90"
# fmt: off
SHARED = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
GATHERED = "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
STAGES = "--pipeline-model-parallel-size 2"
CHUNKS = f"{STAGES} --num-virtual-stages-per-pipeline-rank 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
HALVES = f"{STAGES} --dynapipe-layers-per-stage 2.5,1.5 --dynapipe-split-backward on --dynapipe-limit-rc-type none"
MODULES = "--recompute-granularity selective --recompute-modules core_attn moe shared_experts"
# the model, ranks and flags
LAYOUTS = {
    "in step, all terms, overlapped": (TERMS, 2, f"{SHARED} {DISTRIBUTED}"),
    "in step with fillers, gathered, two stages, recomputed": (
        FEW_TOKENS, 4, f"{GATHERED} {STAGES} --dynapipe-limit-rc-type full"),
    "rows with labels, gathered, two stages, recomputed": (
        LABELS, 4, f"{GATHERED} {STAGES} --dynapipe-limit-rc-type full"),
    "packed, gathered, modules recomputed": (TERMS, 2, f"{GATHERED} {MODULES} --dynapipe-layout packed"),
    "replicas that have all": (TERMS, 2, "--moe-token-dispatcher-type allgather"),
    "two chunks, packed, all terms": (TERMS, 4, f"{SHARED} {CHUNKS} --dynapipe-layout packed"),
    "dense layers too, modules recomputed": (DENSE_TOO, 2, f"{SHARED} {MODULES} --dynapipe-limit-rc-type selective"),
    "dense layers too, a layer cut before its experts, passes divided": (DENSE_TOO, 4, f"{SHARED} {HALVES}"),
    "one replica, a layer cut before its experts, passes divided": (PLAIN, 2, HALVES),
    "pieces of samples, dense layers too": (DENSE_TOO, 2, f"{STAGES} --dynapipe-slices 24 --dynapipe-layout packed"),
    "pieces of samples, two stages": (PLAIN, 4, f"{SHARED} {STAGES} --dynapipe-slices 24 --dynapipe-layout packed"),
    "few tokens, four share": (
        FEW_TOKENS, 4, "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"),
    "four replicas, each two share": (DENSE_TOO, 4, f"{SHARED} {DISTRIBUTED}"),
    "tensor-parallel ranks share": (TERMS, 2, f"{SHARED} {TENSOR} --expert-tensor-parallel-size 1"),
    "experts and their tensors, gathered": (TERMS, 4, f"{GATHERED} {TENSOR}"),
    "experts and their tensors": (TERMS, 4, f"{SHARED} {TENSOR}"),
    "experts' tensors over replicas": (PLAIN, 2, "--expert-tensor-parallel-size 2"),
    "four share over tensors and replicas": (
        TERMS, 4, f"{TENSOR} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
        " --moe-token-dispatcher-type alltoall"),
    "replicas, stages and tensors": (TERMS, 8, f"{SHARED} {STAGES} {TENSOR} --dynapipe-limit-rc-type full"),
}
# fmt: on
DAILY = "in step with fillers, gathered, two stages, recomputed"
ROWS = [pytest.param(*row, id=name, marks=[] if name == DAILY else pytest.mark.slow) for name, row in LAYOUTS.items()]


@pytest.fixture(scope="module")
def one_rank(data, tmp_path_factory):
    """By the flags of the model: where one rank's weights are, and what it trains from them."""

    @functools.cache
    def train(model: str) -> tuple[Path, dict[str, float]]:
        folder = tmp_path_factory.mktemp("one")
        run(data, f"{model} --train-iters 1 --save {folder} --save-interval 1", 1, folder / "first")
        return folder, run(data, f"{model} {begun_from(folder)}", 1, folder / "second")["losses"]

    return train


@pytest.mark.parametrize(("model", "ranks", "flags"), ROWS)
def test_a_layout_trains_what_one_rank_trains(data, one_rank, tmp_path, model, ranks, flags):
    folder, expected = one_rank(model)
    last = run(data, f"{model} {flags} {begun_from(folder)}", ranks, tmp_path / "report")
    assert last["losses"].keys() == {"1", "2", "3"} and last["losses"] == pytest.approx(expected, rel=1e-5)
    if model == FEW_TOKENS:
        assert fillers(last["stdout"]) > 0


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(data, tmp_path):
    """With its optimizer, and with what routers have counted."""
    begun = f"{TERMS} {SHARED} {DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
    saved = f"--save {tmp_path / 'saved'} --save-interval 2"
    whole = run(data, f"{begun} --train-iters 4 {saved}", 2, tmp_path / "whole")["losses"]
    resumed = f"{begun} {STAGES} --train-iters 4 --load {tmp_path / 'saved'} --ckpt-step 2"
    losses = run(data, resumed, 4, tmp_path / "resumed")["losses"]
    assert losses == pytest.approx({key: whole[key] for key in ("3", "4")}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_soak_of_uneven_iterations(data, tmp_path):
    """Batches of a few tokens, and a learning rate that unbalances the experts: fillers, empty experts, no hang."""
    flags = f"{FEW_TOKENS} {SHARED} {STAGES} --train-iters 200 --lr 1e-2"
    last = run(data, flags, 4, tmp_path / "report", deadline_s=500)
    assert len(last["losses"]) == 200 and fillers(last["stdout"]) > 20


def test_a_rank_that_dies_ends_the_job(data, tmp_path):
    argv = entry_scripts.words("gpt", data, f"{EXPERTS} {SHARED} --train-iters 50", report=tmp_path / "report")
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(die_at_iteration_3, 2, {"argv": argv}, deadline_s=90)
    message = str(failed.value)
    assert f"rank 1: died with exit code {-signal.SIGKILL}" in message
    assert "did not end in time" not in message, "the harness waits 10 s for the others"


def die_at_iteration_3(*, rank: int, world_size: int, argv: list[str]) -> None:
    def after(iteration: int) -> None:
        if rank == 1 and iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    entry_scripts.record_losses(after)
    status = entry_scripts.run_script(entry_scripts.script_of("gpt"), argv)
    raise RuntimeError(f"ended with {status}")


def begun_from(folder: Path) -> str:
    return f"--train-iters 3 --load {folder} --finetune"


def fillers(log: str) -> int:
    """Micro-batches without samples, at least: those of iterations of fewer samples than micro-batches."""
    count, before = 0, 0
    for samples, counts in re.findall(r"consumed samples:\s*(\d+) [^~]*? planned:.*? micro-batches: ([\d+]+)", log):
        count += max(sum(map(int, counts.split("+"))) - (int(samples) - before), 0)
        before = int(samples)
    return count


def run(data: Path, flags: str, ranks: int, report: Path, deadline_s: float = 150) -> dict:
    """The last rank's losses by iteration, and what it has printed."""
    flags = f"{EXPERTS} {flags}"
    return entry_scripts.train("gpt", data, flags, ranks=ranks, report=report, deadline_s=deadline_s)[-1]
