"""The entry point: parses arguments, runs one command, turns errors into one line, a hint and an exit code.

Exit codes: 0 fine; 1 a problem was found in what was checked; 2 it could not run. Data goes to stdout, everything
else to stderr.
"""

import argparse
import importlib
import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import IO, NoReturn, override

from megatron_dynapipe import __version__
from megatron_dynapipe.core.errors import DynaPipeError, near_name
from megatron_dynapipe.extras import missing

PROGRAM = "megatron-dynapipe"

_MEASURED = "--data data/demo --model-config configs/demo_gpt.yaml --cost-model cost-model.json --device-memory-mb 4000"
_COMPUTED = "--data data/demo --model-config configs/llama_like_8b.yaml --cost-model analytic --cluster h100_80gb"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("doctor", "data demo --output data/demo", "report dynapipe-report"),
    "doctor": ("doctor", "doctor --json"),
    "data": ("data demo --output data/demo", "data stats data/demo"),
    "data demo": ("data demo --output data/demo",),
    "data prepare": (
        "data prepare tasks/*.jsonl --tokenizer data/demo/tokenizer --output data/tasks",
        "data prepare --mixture mixture.yaml --tokenizer data/demo/tokenizer --output data/mixture --workers 8",
    ),
    "data verify": ("data verify data/demo",),
    "data show": ("data show data/demo --limit 3", "data show data/demo --model t5 --json > tokens.jsonl"),
    "data stats": ("data stats data/demo", "data stats data/demo --split valid --json > lengths.json"),
    "plan": (
        f"plan {_MEASURED} --pipeline-parallel 2 --limit 4 --output plans",
        f"plan {_COMPUTED} --pipeline-parallel 4 --limit 4 --json > planned.json",
    ),
    "compare": (
        f"compare {_MEASURED} --pipeline-parallel 2 --limit 1",
        f"compare {_COMPUTED} --pipeline-parallel 4 --limit 1 --json > compared.json",
    ),
    "tune": (
        f"tune {_COMPUTED} --devices 16 --limit 1",
        f"tune {_MEASURED} --devices 4 --json > layouts.json",
        f"tune {_MEASURED} --devices 2 --validate 2 -- pretrain_gpt_multitask.py"
        " --dynapipe-config configs/demo_gpt.yaml --dynapipe-data data/demo",
    ),
    "orchestrate": (
        "orchestrate --profile segments.json --micro-batch-size 4 --global-batch-size 256 --devices 16",
        "orchestrate --profile segments.json --micro-batch-size 32 --global-batch-size 2048 --devices 16"
        " --devices-per-node 1 --inter-node-gbps 10 --json",
    ),
    "verify": ("verify plans/iteration-0.plan",),
    "show": (
        "show plans/iteration-0.plan",
        "show plans/iteration-0.plan --replica 0 --picture timeline.svg --trace timeline.json",
    ),
    "report": (
        "report dynapipe-report",
        "report dynapipe-report --json > run.json",
        "report dynapipe-report --output run.html",
    ),
    "certify": (
        "certify -- --dynapipe-config configs/demo_gpt.yaml",
        "certify --ranks 4 --json -- --dynapipe-config configs/demo_t5.yaml > certificate.json",
    ),
    "cost-model": ("cost-model show cost-model.json", "cost-model check cost-model.json"),
    "cost-model show": ("cost-model show cost-model.json",),
    "cost-model diff": ("cost-model diff before.json after.json",),
    "cost-model check": ("cost-model check cost-model.json --keep 0.5",),
    "profile": (
        "profile --model gpt --output cost-model.json --budget-minutes 1 -- --dynapipe-config configs/demo_gpt.yaml",
    ),
    "convert": (
        "convert from-hf models/Llama-3.2-1B checkpoints/llama",
        "convert to-hf checkpoints/llama-run models/mine --like models/Llama-3.2-1B",
    ),
    "convert from-hf": ("convert from-hf models/flan-t5-large checkpoints/flan",),
    "convert to-hf": ("convert to-hf checkpoints/flan-run models/mine --like models/flan-t5-large",),
    "patch": ("patch Megatron-LM --check", "patch Megatron-LM", "patch Megatron-LM --reverse"),
}
"""Lines without the program's name, by command."""


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Put the examples of a parser and of its commands at the end of their help."""
    name = parser.prog.removeprefix(PROGRAM).strip()
    lines = [f"  {PROGRAM} {example}" for example in EXAMPLES.get(name, ())]
    if lines:
        before = [parser.epilog, ""] if parser.epilog else []
        parser.epilog = "\n".join([*before, "examples:", *lines])
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                add_examples(command)


COMMANDS = {
    "doctor": "what is installed, and whether it can train here",
    "data": "make a tokenised dataset, or describe one",
    "plan": "lengths, costs and a parallel layout → plans",
    "compare": "predicted time, memory and padding of plans and of other trainers' micro-batches",
    "tune": "which parallel layout of a cluster trains these batches fastest",
    "orchestrate": "stages with different numbers of replicas for a layer profile",
    "verify": "check that a plan file can run, or say what is wrong with it",
    "show": "a plan as text, a timeline picture, or a Chrome/Perfetto trace",
    "report": "a run's records as a summary and as one HTML page",
    "certify": "prove that a run trains exactly what one process without plans trains",
    "cost-model": "show, compare, check cost model files",
    "profile": "measure a model's layers on this machine, for a cost model file",
    "convert": "HuggingFace's files of GPT-2, LLaMA, Mistral, Mixtral, Qwen, T5 v1.1, mT5 to Megatron's, and back",
    "patch": "apply, check, merge or reverse the patches on a Megatron-LM checkout",
}
"""The purpose of each command, in the order of `--help`; its module in `megatron_dynapipe.cli` has its name."""

GROUPS = {
    "prepare": ("doctor", "data", "convert", "patch"),
    "predict": ("plan", "compare", "tune", "orchestrate"),
    "measure and prove": ("profile", "cost-model", "certify"),
    "look": ("verify", "show", "report"),
}
"""Commands by what they are for."""

EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130


class UsageError(DynaPipeError):
    """Arguments that cannot be parsed."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and a hint, with full option names only.

    Subcommands' parsers are of this class too.
    """

    def __init__(self, **settings: object) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    @override
    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Refuse unknown arguments here, where the command's own options are known and can be suggested.

        What follows `--` is another command's; argparse would have it begin at the first word that it does not know.
        """
        remainder = [action for action in self._actions if action.nargs == argparse.REMAINDER]
        words = list(args or ())
        taken = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words) if remainder else ():
            if word.startswith("--") and word.partition("=")[0] not in taken:
                message = f"unrecognized arguments: {word}"
                raise UsageError(message, hint=_nearest(message, taken) or "flags of a training run follow after --")
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    @override
    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` where argparse would print its usage and exit."""
        raise UsageError(message, hint=_nearest(message, self._option_string_actions) or f"see `{self.prog} --help`")


def _nearest(message: str, options: Iterable[str]) -> str | None:
    """A guess at what was meant by a name that argparse does not know."""
    choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    near = None
    if choice:
        near = near_name(choice[1], re.findall(r"[\w-]+", choice[2]))
    elif option:
        near = near_name(option[1], options)
    return near and f"did you mean {near}?"


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The whole command line's parser; if a command is asked for, no other's module is imported for its arguments."""
    parser = Parser(prog=PROGRAM, description=f"Dynamic pipelines for Megatron-LM.\n\n{_grouped()}")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, help="one of these")
    for name in COMMANDS:
        command = subparsers.add_parser(name)
        if asked in (None, name):
            module = _command(name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    add_examples(parser)
    return parser


def _grouped() -> str:
    """The commands with their purposes, in groups."""
    lines = []
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:12}{COMMANDS[name]}" for name in names if name in COMMANDS]
    return "\n".join(lines)


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"megatron_dynapipe.cli.{name.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    try:
        words = sys.argv[1:] if argv is None else argv
        if "_ARGCOMPLETE" in os.environ:  # a shell completes a command line; the process ends here
            importlib.import_module("argcomplete").autocomplete(build_parser())
        args = build_parser(words[0] if words else "").parse_args(words)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except DynaPipeError as error:
        _report(error, sys.stderr)
        return EXIT_CANNOT_RUN
    except ModuleNotFoundError as error:  # what an extra brings; anything else is a fault of ours
        if (problem := missing(error)) is None:
            raise
        _report(problem, sys.stderr)
        return EXIT_CANNOT_RUN
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:  # a full disk, a folder that cannot be written: never a fault of ours
        where = f"{error.filename}: " if error.filename else ""
        _report(DynaPipeError(f"{where}{error.strerror or error}"), sys.stderr)
        _drop_output()
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """Drop what cannot be written to stdout: Python's flush at exit would complain of it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: DynaPipeError, stream: IO[str]) -> None:
    print(f"error: {error.message}", file=stream)
    if error.hint is not None:
        print(f"hint: {error.hint}", file=stream)
