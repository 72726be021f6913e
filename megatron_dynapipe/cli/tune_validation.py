"""What `tune` does with the best layouts: run files of them, and training them for a few iterations."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.cli.batch_arguments import positive
from megatron_dynapipe.cli.planning_arguments import above_zero
from megatron_dynapipe.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dynapipe.planning.settings import PlannerSettings
    from megatron_dynapipe.tuning import TunedLayout, Tuning

ANALYTIC = "analytic"
"""The `--cost-model` that is no file."""


def add_validation_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of training the best layouts."""
    validation = parser.add_argument_group("training the best layouts for a few iterations, here")
    validation.add_argument(
        "--validate",
        type=positive,
        metavar="K",
        help="train the K best and rank them by measured time; needs -- SCRIPT",
    )
    validation.add_argument(
        "--validate-iterations", type=positive, default=5, metavar="N", help="the first does not count (%(default)s)"
    )
    validation.add_argument(
        "--validate-rounds", type=positive, default=1, metavar="N", help="times that each is trained (%(default)s)"
    )
    validation.add_argument(
        "--validate-deadline-s", type=above_zero, default=600.0, metavar="S", help="of one run (%(default)g)"
    )
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS", help="for --validate")


def check_validation(args: argparse.Namespace) -> None:
    """Refuse, before the search, what could not be validated after it."""
    words = [word for word in args.command_line if word != "--"]
    if args.validate is None:
        if words:
            raise ConfigError(f"a training script goes with --validate, and {words[0]!r} was given without it")
        return
    if not words:
        raise ConfigError(
            "expected the training script and its flags after --, for --validate",
            hint="… --validate 3 -- pretrain_gpt_multitask.py --dynapipe-config model.yaml",
        )
    if args.devices > args.devices_per_node:
        raise ConfigError(
            f"expected the devices of one node for --validate, got {args.devices} on nodes of {args.devices_per_node}",
            hint="use --write-config, and train the best layouts by hand",
        )


def validated(tuning: "Tuning", args: argparse.Namespace) -> "Tuning":
    """The tuning with measured times of its best layouts, those first that were measured, the fastest first."""
    import tempfile

    from megatron_dynapipe.tuning import measure, training_command, with_measured

    words = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    count = sum(layout.predicted_ms is not None for layout in tuning.layouts[: args.validate])
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for number in range(count):
            path = Path(folder) / f"layout{number}.yaml"
            write_text(path, layout_file(tuning.layouts[number], tuning.settings[number], args))
            flags = [*words[1:], "--dynapipe-config", str(path), "--dynapipe-report-dir", f"{folder}/report{number}"]
            flags += ["--dynapipe-unset", "save", "--dynapipe-unset", "load"]  # of run files: no checkpoint of a trial
            iterations = args.validate_iterations
            commands.append(training_command(words[0], flags, devices=args.devices, iterations=iterations))
        found = measure(
            commands,
            iterations=args.validate_iterations,
            deadline_s=args.validate_deadline_s,
            rounds=args.validate_rounds,
            said=lambda line: print(line, file=sys.stderr, flush=True),
        )
    return with_measured(tuning, found)


def layout_file(layout: "TunedLayout", settings: "PlannerSettings", args: argparse.Namespace) -> str:
    """A layout's flags, as a run's file: one more `--dynapipe-config`."""
    from megatron_dynapipe.tuning import layout_flags, run_file

    flags = layout_flags(layout, settings)
    if str(args.cost_model) != ANALYTIC:
        flags["dynapipe-cost-model"] = str(args.cost_model)
    return run_file(
        flags,
        f"{layout.data_parallel} replicas × {layout.tensor_parallel} tensor-parallel × {layout.pipeline_parallel}"
        f" stages on {args.devices} devices: {layout.predicted_ms:.1f} ms an iteration, predicted by"
        " `megatron-dynapipe tune`.",
    )


def write_text(path: Path, text: str) -> None:
    """Write a file; raises ConfigError where that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
