"""The flags of transfers: on GPUs as late and as ordered as they can wait, over gloo as early as they can be."""

import argparse

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import transfer_rules
from megatron_dynapipe.plan.transfer_rules import CUDA_RULES, GLOO_RULES, TransferRules


def rules(flags: str, *, on_cpu: bool) -> TransferRules:
    parser = argparse.ArgumentParser()
    transfer_rules.add_arguments(parser.add_argument_group("dynapipe"))
    return transfer_rules.transfer_rules(parser.parse_args(flags.split()), on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("flags", "on_gpus", "on_cpus"),
    [
        ("", CUDA_RULES, GLOO_RULES),
        ("--dynapipe-receive-ahead early", TransferRules(ordered_starts=True), GLOO_RULES),
        (
            "--dynapipe-receive-ahead 2",
            TransferRules(receive_ahead=2, ordered_starts=True),
            TransferRules(receive_ahead=2),
        ),
        ("--dynapipe-ordered-starts off", TransferRules(receive_ahead=0), GLOO_RULES),
        ("--dynapipe-ordered-starts on", CUDA_RULES, TransferRules(ordered_starts=True)),
    ],
)
def test_rules(flags, on_gpus, on_cpus):
    assert rules(flags, on_cpu=False) == on_gpus
    assert rules(flags, on_cpu=True) == on_cpus


@pytest.mark.parametrize("given", ["-1", "1.5", "late"])
def test_what_is_no_number_of_passes(given):
    with pytest.raises(ConfigError, match=f"auto, early or a number of passes, got '{given}'"):
        rules(f"--dynapipe-receive-ahead={given}", on_cpu=True)
