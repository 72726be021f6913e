"""All of Megatron's arguments have a decision, and the decisions are kept."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.integration.flags import fork
from megatron_dynapipe.integration.flags.megatron_flags import FILE, check, decisions, flag_of, own_actions
from tests.helpers.entry_scripts import train
from tests.helpers.megatron_wheels import VERSIONS, unpack
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

OLDER = {"--rl-generation-batch-size", "--rl-parallel-generation-tasks"}
OLDER |= {"--rl-num-parallel-generation-batches", "--rl-num-parallel-generations"}
"""Flags of Megatron 0.18 that 0.19 does not have."""
NEWER = {"--sequence-packing-scheduler", "--use-varlen-dataset", "--varlen-sbhd-validation"}
NEWER |= {"--varlen-mock-dataset-config-json", "--pipeline-p2p-fixed-shape", "--dynamic-context-parallel"}
"""Flags of Megatron's branches main and dev that 0.19 does not have."""
REFUSED = {flag: reason for flag, (outcome, reason) in decisions().items() if outcome.startswith("refused")}
IGNORED = {flag: reason for flag, (outcome, reason) in decisions().items() if outcome == "without effect"}


def flags_of_megatron(rank: int = 0, world_size: int = 1) -> list[str]:
    """The flags of the Megatron that this process imports; those of the fork must not be among any names of theirs."""
    from megatron.training.arguments import add_megatron_arguments

    actions = own_actions(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    names = {name for action in actions for name in action.option_strings}
    assert not names & set(fork.NOT_TAKEN), "flags of the fork that Megatron has, too"
    return [flag_of(action) for action in actions]


def undecided(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag not in decisions()]


def test_every_argument_of_the_installed_megatron_has_a_decision():
    """A flag that is new in Megatron fails here until someone writes down what is done with it."""
    flags = run_ranks(flags_of_megatron, 1)[0]
    missing = undecided(flags)
    assert not missing, f"decide in integration/flags/megatron_flags.txt what a planned run does with {missing}"
    assert {*decisions()} - set(flags) <= OLDER | NEWER


@pytest.mark.parametrize("flag", sorted(NEWER))
def test_a_flag_of_newer_checkouts_is_refused(flag: str) -> None:
    """It was taken without a word."""
    parser = argparse.ArgumentParser()
    parser.add_argument(flag)
    args = parser.parse_args([flag, "default"], argparse.Namespace(use_dynapipe=True, transformer_impl="local"))
    with pytest.raises(ConfigError, match=f"{flag} cannot be used with DynaPipe: {REFUSED[flag]}"):
        check(args, ModelFamily.GPT, parser._actions[1:])


PRINT = """
from megatron_dynapipe import cpu
cpu.quieten()
cpu.enable("cpu")
import json, sys
from tests.integration.flags.test_megatron_flags import flags_of_megatron
json.dump(flags_of_megatron(), open(sys.argv[1], "w"))
"""


@pytest.mark.slow  # 20 s for each
@pytest.mark.parametrize("version", VERSIONS)
def test_every_argument_of_a_supported_megatron_has_a_decision(version, tmp_path):
    folder = unpack(version, tmp_path / "megatron")
    environment = os.environ | {"PYTHONPATH": f"{folder}:{Path(__file__).parents[3]}"}
    subprocess.run([sys.executable, "-c", PRINT, tmp_path / "found.json"], check=True, env=environment)
    assert undecided(json.loads((tmp_path / "found.json").read_text())) == []


def test_every_flag_stands_once_under_a_known_heading():
    written = [flag for line in FILE.read_text().splitlines() if line.startswith(" ") for flag in line.split()]
    assert len(written) == len(decisions()) > 800
    assert all(flag.startswith("--") for flag in written)
    places = ("", " outside a patched checkout", " and --transformer-impl local", " for a T5")
    outcomes = {"supported", "without effect", *(f"refused{place}" for place in places)}
    assert {outcome for outcome, _ in decisions().values()} == outcomes


@pytest.mark.parametrize(
    "flag", ["--mtp-num-layers", "--experimental-attention-variant", "--use-megatron-fsdp", "--context-parallel-size"]
)
def test_compositions_that_megatron_7452_reports_to_train_something_else_are_refused(flag):
    assert flag in REFUSED
    assert not [flag for flag in decisions() if "smooth" in flag], "labels are smoothed by none"


def test_a_patched_checkout_builds_its_own_model():
    """What the entry scripts refuse, see REFUSED in `test_command_line.py`."""
    flag = argparse.ArgumentParser().add_argument("--multi-latent-attention", action="store_true")
    args = argparse.Namespace(use_dynapipe=True, transformer_impl="local", multi_latent_attention=True)
    assert check(args, ModelFamily.GPT, [flag]) == []


def test_reasons_that_name_a_flag_are_true():
    """A flag that "goes with" a refused one is without effect only if that one is refused, or has no effect itself."""
    for flag, reason in IGNORED.items():
        named = [word.strip(",") for word in reason.split() if word.startswith("--")]
        if reason.startswith("it goes with --") and "--optimizer" not in named:
            assert all(name in REFUSED or name in IGNORED for name in named), flag


def test_an_entry_script_says_what_has_no_effect_once(tmp_path):
    data = make_dataset(tmp_path / "data")
    flags = "--train-iters 1 --pipeline-model-parallel-size 2 --split 9,1,0 --moe-ncclep-zero-copy"
    flags += " --no-tp-comm-split-ag --rl-partial-rollouts"
    first, second = train("gpt", data, flags, ranks=2, report=tmp_path / "report")
    (line,) = (line for line in first["stdout"].splitlines() if line.startswith("without effect on a planned run: "))
    for said in (
        "--split (samples come from --dynapipe-data)",
        "--moe-ncclep-zero-copy (planned runs have Megatron's plain expert layers)",
        "--no-tp-comm-split-ag (it goes with --tp-comm-overlap, which is refused)",
        "--rl-partial-rollouts (it goes with --perform-rl-step, which is refused)",
    ):
        assert said in line
    assert "without effect" not in second["stdout"]
