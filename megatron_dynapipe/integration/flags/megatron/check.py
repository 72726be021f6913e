"""Megatron's arguments as they were given, held against the table."""

import argparse
import functools
from collections.abc import Sequence

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags.megatron import IGNORED, REFUSED, Refusal
from megatron_dynapipe.units import ModelFamily


@functools.cache
def actions() -> Sequence[argparse.Action]:
    """The installed Megatron's own arguments, without anybody's additions and changes of defaults."""
    from megatron.training.arguments import add_megatron_arguments  # which may import this package: not at the top

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return [action for action in parser._actions if action.dest != "help"]  # argparse has no public list of them


def flag_of(action: argparse.Action) -> str:
    """The name under which an argument stands in the table: its first long one."""
    return next(name for name in action.option_strings if name.startswith("--"))


def given(args: argparse.Namespace, known: Sequence[argparse.Action]) -> list[str]:
    """The arguments that have another value than Megatron's default.

    Of several that set one attribute it is the one that sets it to this value.
    """
    of_attribute: dict[str, list[argparse.Action]] = {}
    for action in known:
        of_attribute.setdefault(action.dest, []).append(action)
    found = []
    for name, setters in of_attribute.items():
        default = setters[0].default  # argparse takes the first one's
        value = getattr(args, name, default)
        if value != default:
            found.append(flag_of(next((action for action in setters if action.const == value), setters[0])))
    return found


def check(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> list[str]:
    """Refuse what a planned run would not do as the flag says.

    Args:
        args: parsed, not yet changed by Megatron's own checks.
        family: of the model.
        known: Megatron's arguments.

    Returns:
        For each argument without effect that was given, the flag and why: "--split (samples come from …)".

    Raises:
        ConfigError: names the flag, the reason and what to do.
    """
    flags = given(args, known)
    for flag in flags:
        refusal = REFUSED.get(flag)
        if refusal is not None and _holds(refusal, args, family):
            where = f" {_WHERE[refusal.only]}" if refusal.only else ""
            raise ConfigError(f"{flag} cannot be used with DynaPipe{where}: {refusal.reason}", hint=f"remove {flag}")
    return [f"{flag} ({IGNORED[flag]})" for flag in flags if flag in IGNORED]


_WHERE = {
    "entry script": "outside a patched checkout",
    "local layers": "and --transformer-impl local",
    "T5": "for a T5",
}


def _holds(refusal: Refusal, args: argparse.Namespace, family: ModelFamily) -> bool:
    match refusal.only:
        case "entry script":
            return not args.use_dynapipe  # the entry scripts need no such flag
        case "local layers":
            return bool(args.transformer_impl == "local")
        case "T5":
            return family is ModelFamily.T5
        case _:
            return True
