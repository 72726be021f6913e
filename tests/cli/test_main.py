"""The command line's frame: arguments, errors, exit codes, and what is not imported."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe import __version__, cli
from megatron_dynapipe.cli import main as frame
from megatron_dynapipe.errors import DataError, DynaPipeError


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


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        ([], "the following arguments are required: COMMAND", "see `megatron-dynapipe --help`"),
        (["ecko"], "argument COMMAND: invalid choice: 'ecko' (choose from", "did you mean echo?"),
        (["zzz"], "argument COMMAND: invalid choice: 'zzz' (choose from", "see `megatron-dynapipe --help`"),
        (
            ["store", "start"],
            "the command store is gone; in its place: valkey-server or redis-server serves",
            "see `megatron-dynapipe --help`",
        ),
        (["echo", "--sampels=3"], "unrecognized arguments: --sampels=3", "did you mean --samples?"),
        (["echo", "--sam=3"], "unrecognized arguments: --sam=3", "did you mean --samples?"),
        (
            ["echo", "--samples", "x"],
            "argument --samples: invalid int value: 'x'",
            "see `megatron-dynapipe echo --help`",
        ),
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


def test_a_command_that_is_gone_names_what_takes_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["launch", "--nnodes", "1:4", "pretrain_gpt_multitask.py"]) == 2
    line, *_ = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: the command launch is gone; in its place: torchrun --nnodes MIN:MAX --max-restarts 100"
    )


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


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_module_and_program_are_the_same_command() -> None:
    program = Path(sys.executable).with_name("megatron-dynapipe")
    assert python("-m", "megatron_dynapipe", "--version").stdout == f"megatron-dynapipe {__version__}\n"
    if program.exists():
        assert python(str(program), "--version").stdout == f"megatron-dynapipe {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = """
import sys
from megatron_dynapipe.cli.main import build_parser
build_parser("").format_help()
heavy = {"torch", "numpy", "redis", "matplotlib", "megatron", "transformers", "datasets"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_reader_that_has_seen_enough_is_no_error() -> None:
    program = """
from megatron_dynapipe.cli import doctor, main
doctor.run = lambda args: print("x" * 1_000_000) or 0
main.main(["doctor"])
"""
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -c 1', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "x", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "has_bar"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_for_terminals(monkeypatch, capsys, stream, has_bar):
    err = stream()
    monkeypatch.setattr(cli.sys, "stderr", err)
    monkeypatch.setattr(cli, "_DELAY_S", 0.0)
    for item in cli.with_progress([1, 2, 3], unit="batches"):
        cli.say(f"line {item}")
    assert capsys.readouterr().out == "line 1\nline 2\nline 3\n"
    assert ("batches" in err.getvalue()) == has_bar
