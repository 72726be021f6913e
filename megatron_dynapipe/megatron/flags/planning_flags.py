"""The flags that say what plans choose among, in one table for training (`--dynapipe-…`) and for commands."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import LENGTH_MULTIPLE, BatchLayout, Recompute
from megatron_dynapipe.costing import parse_layer_split

TRAINING = "--dynapipe-"
"""How training's flags begin."""
AUTO = "auto"
EQUAL = "equal"
"""Splits of layers that are not numbers. `auto` gives way to flags that say more."""
ADAPTIVE = "adaptive"
"""The schedule that is searched."""
MOST = 10**6
"""The most layers, ranks, widths and lengths: no model has as many, and sums of their costs stay inside 64 bits."""
MOST_REAL = 1e9
"""The most megabytes, seconds, Gbit/s and microseconds."""


def number[N: (int, float)](kind: type[N], least: N, most: N, *, above: bool = False) -> Callable[[str], N]:
    """A type of arguments: numbers from `least` (`above`: greater ones) to `most`."""
    bounds = f"{'above' if above else 'from'} {least:g} {'and up ' * above}to {most if kind is int else f'{most:g}'}"

    def parse(text: str) -> N:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and not (above and value == least):
                return value
        raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text}")

    return parse


positive = number(int, 1, MOST)
not_negative = number(int, 0, 10**9)
above_zero = number(float, 0.0, MOST_REAL, above=True)


def pieces(text: str) -> str | int:
    """A type of arguments: whether long samples are cut, or the most positions of a piece."""
    if text in (AUTO, "off"):
        return text
    if not text.isdecimal() or int(text) < LENGTH_MULTIPLE:
        raise argparse.ArgumentTypeError(f"expected auto, off or at least {LENGTH_MULTIPLE} positions, got {text!r}")
    return int(text)


def recompute_modes(text: str) -> tuple[Recompute, ...]:
    """A type of arguments: modes of recomputation, each once."""
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(Recompute) or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(Recompute)}, got {text!r}")
    return tuple(mode for mode in Recompute if mode in names)


def layers_per_stage(text: str) -> str | tuple[float, ...]:
    """A type of arguments: `AUTO`, `EQUAL`, or the layers of each virtual stage."""
    if text in (AUTO, EQUAL):
        return text
    expected = "layers as 5,2.5,0.5 (multiples of 0.5; the first or the last may be 0), auto or equal"
    try:
        layer_split = parse_layer_split(text, expected=expected)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    if 0 in layer_split[1:-1] or not any(layer_split):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return layer_split


class _Schedules:
    """Names of schedules, which come with the native core: asked for when a value or the help text needs them."""

    def __iter__(self) -> Iterator[str]:
        from megatron_dynapipe.core.orders import SCHEDULES

        return iter(SCHEDULES)

    def __contains__(self, name: object) -> bool:
        return name in [*self]


_TABLE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "device-memory-limit": (
        "device-memory-mb",
        {
            "type": above_zero,
            "metavar": "MB",
            "help": "memory that plans may use on each device, in MB of 1e6 bytes (default: what the cluster's file"
            " says; in training, else what the device has)",
        },
    ),
    "limit-rc-type": (
        "recompute",
        {
            "type": recompute_modes,
            "metavar": "MODES",
            "help": "recompute modes that plans may give a micro-batch, some of none,selective,full (default: all; in"
            " training, what --recompute-granularity says)",
        },
    ),
    "layout": (
        "",
        {
            "choices": (AUTO, *BatchLayout),
            "default": AUTO,
            "help": "pad samples to equal rows, or pack them into one row in which they do not attend to each other;"
            " auto (default) lets each plan take the faster of the two if there is a kernel for packed rows",
        },
    ),
    "slices": (
        "",
        {
            "type": pieces,
            "default": AUTO,
            "metavar": "auto|off|N",
            "help": "cut a GPT's long samples along their sequence into pieces that stages run one after another:"
            " only if the plan gets faster (auto, the default), never (off), or into pieces of at most N"
            " positions",
        },
    ),
    "context-teams": (
        "",
        {
            "type": positive,
            "default": 1,
            "metavar": "N",
            "help": "let up to N replicas, 2, 4, 8 …, run a GPT's long samples together, each a share of"
            " every sample, if the plan gets faster (default 1: none)",
        },
    ),
    "split-backward": (
        "",
        {
            "choices": (AUTO, "on", "off"),
            "default": AUTO,
            "help": "run backward passes in two halves, so that a stage computes gradients of weights while it would"
            " wait: only if the plan gets faster (auto, the default), whenever possible (on), or never (off)",
        },
    ),
    "schedule": (
        "",
        {
            "choices": _Schedules(),
            "default": ADAPTIVE,
            "metavar": "NAME",
            "help": "how plans order passes, one of %(choices)s: adaptive (default) searches the order together with"
            " the micro-batches, the others are fixed",
        },
    ),
    "layers-per-stage": (
        "layer-split",
        {
            "type": layers_per_stage,
            "default": EQUAL,
            "metavar": "N,N,…|auto|equal",
            "help": "number of layers on each (virtual) stage, in model order and in multiples of 0.5: a stage that"
            " ends at .5 has the attention of its last layer, and the next stage begins with its MLP. A T5's"
            " encoder layers come first; a HybridModel counts its modules. auto plans the numbers from costs"
            " and lengths, in training with virtual stages unless other flags set them (default: equal, which"
            " Megatron's checkpoints of one layout need)",
        },
    ),
    "scatter-gather": (
        "",
        {
            "choices": ("off", "on", AUTO),
            "default": AUTO,
            "help": "let the tensor-parallel ranks of a stage each send a part of a message, which the receiving"
            " ranks gather: only if the links make that faster (auto, the default in training), always (on),"
            " or never (off, the default of commands, as in the published rules for transfers)",
        },
    ),
    "expert-imbalance": (
        "",
        {
            "type": above_zero,
            "default": 1.25,
            "metavar": "N",
            "help": "how many times the mean number of tokens the busiest of the ranks that share experts gets: plans"
            " leave that much room and time for experts (default 1.25)",
        },
    ),
}
"""By name without a prefix: how commands have spelled it before, if otherwise, and argparse's keywords."""


def add_planning_flags(
    parser: argparse._ActionsContainer, prefix: str = "--", *, without: Sequence[str] = (), **defaults: object
) -> None:
    """Declare the table's flags with a prefix.

    Args:
        parser: or a group of one.
        prefix: `TRAINING`, or that of commands, whose old spellings are taken too.
        without: names that are left out.
        defaults: other defaults than the table's, by destination.
    """
    for name, (spelling, keywords) in _TABLE.items():
        if name not in without:
            names = [prefix + name, *([prefix + spelling] if spelling and prefix != TRAINING else [])]
            parser.add_argument(*names, **keywords)
    parser.set_defaults(**defaults)


def defaults() -> dict[str, object]:
    """What the table's flags are where nobody gives them, by destination."""
    return {name.replace("-", "_"): keywords.get("default") for name, (_, keywords) in _TABLE.items()}
