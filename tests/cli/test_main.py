"""The command line's frame: arguments, errors, exit codes, and what is not imported."""

import argparse
import io
import sys
import types
from pathlib import Path

import pytest

from megatron_dynapipe import __version__, cli
from megatron_dynapipe.cli import main as frame
from megatron_dynapipe.core.errors import DataError, DynaPipeError
from tests.helpers.commands import run, run_python


class Echo:
    """Replaces a command module: raises or returns what it was made with."""

    def __init__(self, outcome: int | BaseException) -> None:
        self.outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--samples", type=int)
        nested = parser.add_subparsers(dest="what")
        nested.add_parser("inner").add_argument("--output")

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    command = Echo(0)
    monkeypatch.setattr(frame, "COMMANDS", {"echo": "does what the test says"})
    monkeypatch.setattr(frame, "_command", lambda name: command)
    return command


SEE = "see `megatron-dynapipe --help`"


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        ([], "the following arguments are required: COMMAND", SEE),
        (["ecko"], "argument COMMAND: invalid choice: 'ecko' (choose from", "did you mean echo?"),
        (["zzz"], "argument COMMAND: invalid choice: 'zzz' (choose from", SEE),
        (["echo", "--sampels=3"], "unrecognized arguments: --sampels=3", "did you mean --samples?"),
        (["echo", "--sam=3"], "unrecognized arguments: --sam=3", "did you mean --samples?"),
        (["echo", "--samples", "x"], "argument --samples: invalid int value", "see `megatron-dynapipe echo --help`"),
        (["echo", "inner", "--outptu", "f"], "unrecognized arguments: --outptu f", "did you mean --output?"),
    ],
)
def test_bad_arguments_are_one_line_and_a_hint(echo, capsys, argv, error, hint):
    assert frame.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second == f"hint: {hint}"


@pytest.mark.parametrize(
    ("outcome", "code", "err"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (DataError("no such folder", hint="build it"), 2, "error: no such folder\nhint: build it\n"),
        (DynaPipeError("broken"), 2, "error: broken\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_outcomes_become_exit_codes(echo, capsys, outcome, code, err):
    echo.outcome = outcome
    assert frame.main(["echo"]) == code
    assert capsys.readouterr() == ("", err)


def test_own_bugs_keep_their_traceback(echo: Echo) -> None:
    echo.outcome = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        frame.main(["echo"])


def test_every_command_is_in_a_group_of_the_help() -> None:
    grouped = [name for names in frame.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(frame.COMMANDS)
    text = frame.build_parser("").format_help()
    assert all(f"\n  {name} " in text and frame.COMMANDS[name] in text for name in grouped)


def test_a_shell_is_answered_with_the_whole_parser(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    """As argcomplete, which ends the process once it has answered."""

    def autocomplete(parser: argparse.ArgumentParser) -> None:
        assert "--samples" in parser._subparsers._group_actions[0].choices["echo"].format_help()
        raise SystemExit(0)

    monkeypatch.setitem(sys.modules, "argcomplete", types.SimpleNamespace(autocomplete=autocomplete))
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit):
        frame.main([])


def test_module_and_program_are_the_same_command() -> None:
    program = Path(sys.executable).with_name("megatron-dynapipe")
    for command in ([sys.executable, "-m", "megatron_dynapipe"], [program])[: 1 + program.exists()]:
        assert run(*command, "--version").stdout == f"megatron-dynapipe {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = """
import sys
from megatron_dynapipe.cli.main import build_parser
build_parser("").format_help()
heavy = {"torch", "numpy", "redis", "matplotlib", "megatron", "transformers", "datasets"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    run_python("-c", program)


def test_reader_that_has_seen_enough_is_no_error() -> None:
    program = """
from megatron_dynapipe.cli import doctor, main
doctor.run = lambda args: print("x" * 1_000_000) or 0
main.main(["doctor"])
"""
    done = run("bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 1', sys.executable, program)
    assert (done.stdout, done.stderr) == ("x", "")


@pytest.mark.parametrize("has_bar", [True, False])
def test_a_bar_is_for_terminals(monkeypatch, capsys, has_bar):
    err = io.StringIO()
    err.isatty = lambda: has_bar
    monkeypatch.setattr(cli.sys, "stderr", err)
    monkeypatch.setattr(cli, "_DELAY_S", 0.0)
    for item in cli.with_progress([1, 2, 3], unit="batches"):
        cli.say(f"line {item}")
    assert capsys.readouterr().out == "line 1\nline 2\nline 3\n"
    assert ("batches" in err.getvalue()) == has_bar
