"""The flags of when transfers are started, and the rules that plans are made under with them."""

import argparse

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.plan.transfer_rules import CUDA_RULES, GLOO_RULES, TransferRules

AUTO, EARLY = "auto", "early"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags."""
    group.add_argument(
        "--dynapipe-receive-ahead",
        default=AUTO,
        metavar="auto|early|N",
        help="passes that may run between a receive's start and its wait: on GPUs 0, because a pending receive "
        "occupies the device; over gloo as early as one per channel (default: auto)",
    )
    group.add_argument(
        "--dynapipe-ordered-starts",
        choices=(AUTO, "on", "off"),
        default=AUTO,
        help="plan only what also ends where a send's start waits for its channel's previous message, as on one "
        "hardware queue (auto: on for GPUs)",
    )


def transfer_rules(args: argparse.Namespace, *, on_cpu: bool) -> TransferRules:
    """The rules that the flags ask for.

    Raises:
        ConfigError: `--dynapipe-receive-ahead` is no number, auto or early.
    """
    usual = GLOO_RULES if on_cpu else CUDA_RULES
    given, ordered = args.dynapipe_receive_ahead, args.dynapipe_ordered_starts
    if given not in (AUTO, EARLY) and not given.isdecimal():
        raise ConfigError(f"expected --dynapipe-receive-ahead auto, early or a number of passes, got {given!r}")
    ahead = {AUTO: usual.receive_ahead, EARLY: None}
    return TransferRules(
        receive_ahead=ahead[given] if given in ahead else int(given),
        ordered_starts=usual.ordered_starts if ordered == AUTO else ordered == "on",
    )
