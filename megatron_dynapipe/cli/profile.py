"""`profile`: measure a model's layers on this machine → a cost model file."""

import argparse
import contextlib
import sys
from pathlib import Path

from megatron_dynapipe import config, cpu
from megatron_dynapipe.cli.model_config import adapters_of, add_adapter_arguments, measured_words
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.document import is_cost_file
from megatron_dynapipe.megatron.flags.planning_flags import MOST, above_zero, number, positive
from megatron_dynapipe.outputs import check_replaceable, is_first_rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = (
        "Flags of Megatron and of DynaPipe follow after --: the run's own, such as"
        " `-- --dynapipe-config configs/demo_t5.yaml`. With several ranks, start it by torchrun with"
        " `-m megatron_dynapipe profile`: the links between them are measured too."
    )
    add = parser.add_argument
    add("--model", type=ModelFamily, choices=tuple(ModelFamily), help="kind of model")
    recipe = "take model and adapters from a recipe of Megatron-Bridge (.yaml), in place of a run's flags"
    add("--model-config", type=Path, metavar="FILE", help=recipe)
    add("--output", required=True, type=Path, metavar="FILE", help="the cost model file (.json)")
    add("--recompute", default="none,selective,full", metavar="MODES", help="(%(default)s)")
    add("--tensor-parallel", type=positive, default=1, metavar="N", help="ranks that share a layer")
    add("--budget-minutes", type=above_zero, default=5.0, metavar="M", help="time to spend (%(default)s)")
    most = "of a measured micro-batch (%(default)s)"
    add("--max-positions", type=number(int, 8, MOST), default=16384, metavar="N", help=most)
    add("--vocabulary", type=positive, metavar="N", help="tokens, for a model without a dataset")
    add_adapter_arguments(parser)
    add("flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="the run's flags")


def run(args: argparse.Namespace) -> int:
    """Measure; print the file's path on rank 0."""
    flags = config.expand(args.flags[1:] if args.flags[:1] == ["--"] else args.flags)
    if args.model_config is not None:
        flags = [*measured_words(args), *flags]
    if args.model is None:
        raise ConfigError("expected a kind of model, got none", hint="pass --model gpt, or --model-config RECIPE.yaml")
    if is_first_rank():  # which writes the file
        check_replaceable(args.output, is_ours=is_cost_file)
    with contextlib.redirect_stdout(sys.stderr):  # Megatron logs there
        cpu.quieten()
        if cpu.enable(config.early_flags(flags).dynapipe_device):
            cpu.silence_prints()
        from megatron_dynapipe.megatron.profiling.command import profile

        path = profile(
            flags,
            family=args.model,
            output=args.output,
            recompute=args.recompute.split(","),
            tensor_parallel=args.tensor_parallel,
            budget_s=args.budget_minutes * 60,
            most_positions=args.max_positions,
            vocabulary=args.vocabulary,
            adapters=adapters_of(args),
            recipe=args.model_config,
        )
    if path is not None:
        print(path)
    return 0
