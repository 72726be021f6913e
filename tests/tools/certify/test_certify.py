"""A certificate holds for runs that are right, and names what is wrong with one that is not.

Runs are forked, as in other tests of several ranks; one goes through the command line and torchrun.
"""

import json

import msgspec
import pytest
import torch

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.tools.certify.flags import HALVES, with_rates
from megatron_dynapipe.tools.certify.records import RankRecord
from megatron_dynapipe.tools.certify.verdict import checks_fp32, checks_half
from tests.helpers import entry_scripts
from tests.helpers.processes import run_ranks

STAGES = "--pipeline-model-parallel-size 3 --dynapipe-layers-per-stage 1,2,1 --dynapipe-layout packed"
TWO = "--pipeline-model-parallel-size 2"
PIECES = f"{STAGES} --dynapipe-slices 24"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1 --dynapipe-limit-rc-type full"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-z-loss-coeff 0.01 --moe-aux-loss-coeff 0.5"
    " --moe-router-load-balancing-type seq_aux_loss"
)
WIDER = "--hidden-size 128 --ffn-hidden-size 512 --global-batch-size 2"
TEAMS = "--use-distributed-optimizer --dynapipe-context-teams 2"
TARGETS = "--dynapipe-loss targets"
T5 = "t5"
"""In place of flags of a GPT: the other family."""
PATTERN = f"--hybrid-layer-pattern *-*--E {EXPERTS}"
SHARED = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"

RIGHT = (
    pytest.param("", STAGES, 3, id="three stages"),
    pytest.param(PATTERN, f"{TWO} --dynapipe-layers-per-stage 1,5", 2, id="a pattern with experts"),
    *(
        pytest.param(model, flags, ranks, id=name, marks=pytest.mark.slow)
        for name, model, flags, ranks in (
            ("pieces, replicas", "", f"{PIECES} --use-distributed-optimizer --overlap-grad-reduce", 6),
            ("dropout", "", DROPOUT, 2),
            ("tensor parallel", "--swiglu", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
            ("experts", EXPERTS, SHARED, 2),
            ("cut samples", f"{TARGETS} --seq-length 24 --dynapipe-long-samples truncate", STAGES, 3),
            ("losses of targets", TARGETS, f"{TWO} --dynapipe-layers-per-stage 2.5,1.5 --dynapipe-slices 24", 2),
            ("teams", WIDER, TEAMS, 2),
            ("a T5", T5, f"{TWO} --dynapipe-layers-per-stage 3,1 --dynapipe-layout packed", 4),
        )
    ),
)

FAULTS = {
    # fault: model, flags, ranks, the check that misses, what is said there
    "offsets_swapped": ("", STAGES, 3, "isolation, middle stages", "stage 1: sample "),
    "weight_dropped": ("", STAGES, 3, "losses by sample", " tokens count"),
    "averaged_by_micro_batch": ("", STAGES, 3, "gradients", "times: means of means"),
    "embeddings_not_reduced": (
        "",
        STAGES,
        3,
        "gradients",
        "word_embeddings.weight: the copies of ranks 0 and 2 differ",
    ),
    "shared_weights_not_reduced": (T5, TWO, 2, "gradients", "copies of ranks 0 and 1 differ"),
    "positions_from_zero": ("", PIECES, 3, "losses by sample", ", in pieces"),
    "neighbours_key_seen": ("", STAGES, 3, "isolation, first stage", "stage 0: sample "),
    "replica_counted_twice": ("", "", 2, "gradients", "samples of replica 1 count 2.00 times"),
    "last_stage_never_steps": ("", STAGES, 3, "updates", "word_embeddings.weight: the copies of ranks 0 and 2 differ"),
    "no_rank_steps": ("", STAGES, 3, "updates", "other parameters: 0.00 times what it should be"),
    "ten_times_the_decay": ("", STAGES, 3, "updates", "other parameters: "),
    "half_the_rate_on_one_stage": ("--untie-embeddings-and-output-weights", STAGES, 3, "updates", ": 0.50 times"),
    "other_betas": ("", STAGES, 3, "first moments", "other parameters: "),
    "decay_of_norms_and_biases": ("", STAGES, 3, "updates", "norm"),
    "mask_drawn_anew": ("", DROPOUT, 1, "recomputation", "decoder.layers."),
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The function that runs a role in a folder; references are run once for each model."""
    references = {}

    def run(role, model, flags, ranks, fault=None):
        folder, family = tmp_path_factory.mktemp(role), T5 if model == T5 else "gpt"
        words = f"{model.removeprefix(T5)} --train-iters 3 {flags}"
        argv, _ = with_rates(entry_scripts.words(family, data, words, report=folder / "report"))
        run_ranks("tests.tools.certify.faults:work", ranks,
                  {"role": role, "family": family, "argv": argv, "folder": str(folder), "fault": fault})  # fmt: skip
        return folder

    def planned(model, flags, ranks, fault=None, half=""):
        if model + half not in references:
            begun = half and f"--pretrained-checkpoint {planned(model, '', 1)[1] / 'weights'}"
            references[model + half] = run("reference", model, f"{half} {begun}", 1)
        reference = references[model + half]
        first = references[model] / "weights"
        return run("planned", model, f"{flags} {half} --pretrained-checkpoint {first}", ranks, fault), reference

    return planned


@pytest.mark.parametrize(("model", "flags", "ranks"), RIGHT)
def test_right_runs_are_certified(runs, model, flags, ranks):
    checks, gradients = checks_fp32(*runs(model, flags, ranks))
    assert not [check for check in checks if not check.holds]
    assert len(gradients) > 20 and max(gradients.values()) < 1e-4
    isolated = [check.name for check in checks if check.name.startswith("isolation")]
    assert len(isolated) == int(flags.partition("--pipeline-model-parallel-size ")[2][:1] or 1)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=pytest.mark.slow if i else []) for i, f in enumerate(FAULTS)])
def test_a_fault_is_found_and_named(runs, fault):
    model, flags, ranks, check, said = FAULTS[fault]
    checks, _ = checks_fp32(*runs(model, flags, ranks, fault))
    missed = {line.name: line.where for line in checks if not line.holds}
    assert check in missed and said in missed[check], missed


def test_gpus_may_add_up_in_another_order_and_cpus_may_not(tmp_path):
    part = ("norm.weight", [0], [1], torch.ones(1))
    parts = {"gradients": [part], "updates": [(*part[:3], torch.ones(1))]}
    record = RankRecord(losses=[1.0], norms=[1.0], samples={0: (1.0, 1.0)}, parts=parts, repeated=(1e-6, part[0]))
    for device, holds in (("cpu", False), ("cuda", True)):
        (folder := tmp_path / device).mkdir()
        msgspec.structs.replace(record, device=device).write(folder, 0)
        checks, _ = checks_fp32(folder, folder)
        assert {check.name: check.holds for check in checks if check.name == "determinism"} == {"determinism": holds}


@pytest.mark.parametrize("at", [0, 1])
def test_what_is_not_a_number_is_a_miss_and_said(tmp_path, at):
    """Whichever run has it, and wherever: a comparison with it is neither larger nor smaller than any."""
    part = ("norm.weight", [0], [1], torch.ones(1))
    right = RankRecord(
        losses=[1.0, 1.0], norms=[1.0, 1.0], samples={0: (1.0, 1.0), 1: (1.0, 1.0)}, parts={"gradients": [part]}
    )
    (right_folder := tmp_path / "right").mkdir()
    right.write(right_folder, 0)
    numbers = [float("nan") if place == at else 1.0 for place in (0, 1)]
    nan = [("norm.weight", [0], [1], torch.full((1,), float("nan")))]
    wrong = msgspec.structs.replace(
        right, losses=numbers, samples={at: (numbers[at], 1.0), 1 - at: (1.0, 1.0)}, parts={"gradients": nan}
    )
    (wrong_folder := tmp_path / "wrong").mkdir()
    wrong.write(wrong_folder, 0)
    for planned, reference in ((right_folder, wrong_folder), (wrong_folder, right_folder), (wrong_folder,) * 2):
        checks = {check.name: check for check in checks_fp32(planned, reference)[0]}
        assert [name for name, check in checks.items() if not check.holds] == [
            "losses",
            "losses by sample",
            "gradients",
        ]
        assert checks["losses"].where.startswith(f"iteration {at + 1}: not a number")


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_held_against_its_noise(runs, half):
    exact = runs("", "", 1)[1]
    planned, reference = runs("", TWO, 2, half=f"--{half} {' '.join(HALVES[half])}")
    checks = checks_half(planned, reference, exact, half)
    assert [check.holds for check in checks] == [True, True], checks
    assert min(check.error for check in checks) > 1e-7


def test_the_command(data, capsys, monkeypatch):
    """The command line, and torchrun inside."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cut = f"{TWO} --seq-length 48 --dynapipe-long-samples truncate"
    flags = entry_scripts.words("gpt", data, cut, report=data.parent / "unused")
    assert main(["certify", "--iterations", "2", "--json", "--", *flags]) == 0
    said = capsys.readouterr()
    progress = [line for line in said.err.splitlines() if line.startswith("run ")]
    assert [line.rstrip("0123456789 s") for line in progress[1::2]] == [
        "run 1 of 2 ended after",
        "run 2 of 2 ended after",
    ]
    assert progress[2].startswith("run 2 of 2: planned, fp32, ranks: ") and "at most 1800 s" in progress[2]
    assert "samples are longer than the maximum and were truncated: no target token is lost" in said.err
    printed = json.loads(said.out)
    assert printed["exact"] and len(printed["gradients"]) > 20
    names = {check["name"] for check in printed["checks"]}
    assert names >= {"losses", "gradients", "updates", "first moments", "second moments", "determinism"}
    assert printed["rates"] == "--lr 2e-4 --weight-decay 1"
    assert not (data.parent / "unused").exists()
