"""HybridModel from the entry script: a GPT's checkpoint as a pattern, modules in any order, what is refused."""

import pytest

from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.entry_scripts import train
from tests.helpers.processes import run_ranks
from tests.megatron.flags.test_command_line import parse_each

TWO = "--pipeline-model-parallel-size 2"
EXPERTS = (
    "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
)
SLOW = pytest.mark.slow
PATTERNS = {
    # ranks, flags besides the pattern's; the last word says whether it runs every day
    "equal": (2, f"{TWO} --hybrid-layer-pattern *-*-*-*-", "core"),
    "planned": (2, f"{TWO} --hybrid-layer-pattern *-*-*-*- --dynapipe-layers-per-stage auto", "slow"),
    "virtual stages as segments": (2, f"{TWO} --hybrid-layer-pattern *-*|-|*-*|-", "slow"),
    "modules": (2, f"{TWO} --hybrid-layer-pattern *-*-*-*- --dynapipe-layers-per-stage 3,2,1,2", "slow"),
    "pieces, divided passes": (
        2, f"{TWO} --hybrid-layer-pattern *-*|-*-*- --dynapipe-slices 16 --dynapipe-split-backward on"
        " --dynapipe-limit-rc-type none", "slow"),
    "two tensor ranks": (2, "--hybrid-layer-pattern *-*-*-*- --tensor-model-parallel-size 2", "slow"),
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt(data, tmp_path_factory):
    """The flags to begin with the weights of a GPT, and its losses and predicted times from there."""
    folder = tmp_path_factory.mktemp("gpt")
    saving = f"--train-iters 1 --save {folder / 'weights'} --save-interval 1"
    train("gpt", data, saving, ranks=1, report=folder / "first")
    start = f"--load {folder / 'weights'} --finetune --no-load-optim --train-iters 3"
    losses = train("gpt", data, f"{start} {TWO}", ranks=2, report=folder / "report")[-1]["losses"]
    return start, losses, predicted_ns(folder / "report")


def predicted_ns(report) -> list[float]:
    return [iteration.predicted_ns for iteration in read_run(report).iterations]


@pytest.mark.parametrize(
    ("ranks", "flags", "equal"),
    [
        pytest.param(ranks, flags, name == "equal", id=name, marks=() if when == "core" else SLOW)
        for name, (ranks, flags, when) in PATTERNS.items()
    ],
)
def test_a_gpt_s_checkpoint_goes_on_as_a_pattern(ranks, flags, equal, gpt, data, tmp_path):
    start, expected, times = gpt
    runs = train("gpt", data, f"{start} {flags}", ranks=ranks, report=tmp_path / "report")
    assert runs[-1]["losses"] == pytest.approx(expected, rel=1e-6)
    if equal:
        assert predicted_ns(tmp_path / "report") == pytest.approx(times, rel=0.01)


@SLOW
@pytest.mark.parametrize("flags", ["", f"{TWO} --dynapipe-layout packed"])
def test_modules_in_any_order_resume_in_another_layout(flags, data, tmp_path):
    ranks, model = 1 + bool(flags), f"--hybrid-layer-pattern *-*--E {EXPERTS} --train-iters 4"
    whole = train("gpt", data, f"{model} {flags}", ranks=ranks, report=tmp_path / "whole")[-1]["losses"]
    saving = f"--save {tmp_path / 'saved'} --save-interval 2 --exit-interval 2"
    train("gpt", data, f"{model} {flags} {saving}", ranks=ranks, report=tmp_path / "first")
    split = f"{TWO} --hybrid-layer-pattern *|-*--E {EXPERTS} --train-iters 4 --load {tmp_path / 'saved'}"
    rest = train("gpt", data, split, ranks=2, report=tmp_path / "rest")[-1]["losses"]
    assert rest == pytest.approx({iteration: whole[iteration] for iteration in "34"}, rel=1e-5)


REFUSED = {
    "--hybrid-layer-pattern *-M-": "--hybrid-layer-pattern *-M-: 'M' at position 3 stands for Mamba layers",
    "--hybrid-layer-pattern *-|*-|*-": "expected segments for 2 pipeline stages, as many on each, got 3",
    "--hybrid-layer-pattern *-|*- --dynapipe-layers-per-stage 3,1": "got | at position 3",
    "--hybrid-layer-pattern *-*- --dynapipe-layers-per-stage 2.5,1.5": "expected whole layers on every stage",
    "--hybrid-layer-pattern *-*- --dynapipe-layers-per-stage 2,3": "expected the 4 modules of",
    "--hybrid-layer-pattern *-*": "3 layers cannot be split equally over 2 stages",
    "--hybrid-layer-pattern *-*E": "--hybrid-layer-pattern with E cannot be used with DynaPipe: it needs --num-experts",
    "--hybrid-layer-pattern *- --use-rope-scaling --position-embedding-type rope": "HybridModel has none",
    "--hybrid-override-pattern *-": "--hybrid-override-pattern cannot be used with DynaPipe: give --hybrid-layer-",
}


READ = {
    # flags: modules of each virtual stage, and how their kinds begin
    "--hybrid-layer-pattern *-*E*-": ("(3, 3)", "('attention', 'mlp', 'attention', 'expert mlp', 'attention', 'mlp')"),
    "--hybrid-layer-pattern *E*E --num-virtual-stages-per-pipeline-rank 2": ("(1, 1, 1, 1)", "('attention', 'mlp'"),
    "--hybrid-layer-pattern *-|E": ("(2, 1)", "('attention', 'mlp', 'expert mlp')"),
    "--hybrid-layer-pattern *-|E --dynapipe-layers-per-stage 2,1": ("(2, 1)", "('attention', 'mlp', 'expert mlp')"),
    "--hybrid-layer-pattern *-E* --dynapipe-layers-per-stage auto": ("(2, 2)", "('attention', 'mlp', 'expert mlp', 'a"),
}


def test_what_flags_say_of_a_pattern(data):
    """One process parses all, as for a pipeline of two stages."""
    cases = [["gpt", f"{TWO} {flags} --train-iters 1"] for flags in REFUSED]
    cases += [["t5", f"{TWO} --hybrid-layer-pattern *-*- --train-iters 1"]]
    read = [["gpt", f"{TWO} {EXPERTS} {flags} --train-iters 1"] for flags in READ]
    names = [""] * len(cases)
    names += ["planner.layout.layers_per_stage"] * len(read)
    names += ["planner.model.encoder"] * len(read)
    given = {"data": str(data), "cases": cases + read + read, "read": names, "ranks": 2}
    (said,) = run_ranks(parse_each, 1, given, deadline_s=120)
    for flags, message, refusal in zip(REFUSED, REFUSED.values(), said, strict=False):
        assert refusal is not None and message in refusal and len(refusal.splitlines()) <= 2, (flags, refusal)
    assert "for a T5: the layers of a T5 are two stacks" in said[len(REFUSED)]
    splits, patterns = said[len(cases) : len(cases) + len(read)], said[len(cases) + len(read) :]
    assert splits == [split for split, _ in READ.values()]
    assert all(found.startswith(kinds) for found, (_, kinds) in zip(patterns, READ.values(), strict=True))
