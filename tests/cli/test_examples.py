"""The examples in `--help` and in docs/commands.md: every command has some, and each runs as it stands."""

import argparse
import contextlib
import json
import shlex
from pathlib import Path

import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.main import EXAMPLES
from tests.cli.conftest import cost_model
from tests.docs.workspace import PROGRAM, make_workspace, run_text
from tests.helpers.megatron_wheels import VERSIONS, unpack
from tests.helpers.runs import write_run
from tests.modules.test_planning import costs_of

ROOT = Path(__file__).parents[2]
EVERY = tuple(dict.fromkeys(line for lines in EXAMPLES.values() for line in lines))
PATCHES = tuple(line for line in EVERY if line.startswith("patch "))
SMALLER = (
    ("--budget-minutes 1 ", "--budget-minutes 0.2 "),
    ("--validate 2 ", "--validate 1 --validate-iterations 2 "),
    ("to-hf checkpoints/llama-run", "to-hf checkpoints/llama"),
    ("to-hf checkpoints/flan-run models/mine", "to-hf checkpoints/flan models/other"),
)
"""What lines that train, measure, convert or serve have in place of their own: less time, one machine, no training."""
ORDER = ("profile", "tune", "convert", "certify")
QUICK = tuple(
    line for line in EVERY if not line.startswith((*ORDER, "patch ")) or (line[:4] == "tune" and "--val" not in line)
)


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(inner for action in nested for choice in action.choices.values() for inner in parsers(choice))]


def test_every_command_has_examples_in_its_help() -> None:
    every = parsers(main.build_parser())
    assert {parser.prog.removeprefix(main.PROGRAM).strip() for parser in every} == set(EXAMPLES)
    for parser in every:
        assert f"examples:\n  {main.PROGRAM} " in parser.format_help()


def readers_own(folder: Path) -> None:
    """Task files, a mixture, costs and a run's records, which the examples name."""
    (folder / "tasks").mkdir()
    rows = [{"task": "sums", "input": f"{n} + 1", "target": str(n + 1)} for n in range(200)]
    (folder / "tasks" / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    columns = "columns: {input: input, target: target}"
    (folder / "mixture.yaml").write_text(f"tasks:\n  - {{name: sums, source: tasks/sums.jsonl, {columns}}}\n")
    for name in ("cost-model", "before", "after"):
        (folder / f"{name}.json").write_text(
            json.dumps(cost_model(hidden=128, longest=2048, modes=("none", "selective", "full")))
        )
    costs_of(3, 1, 2).save(folder / "segments.json")
    write_run(folder / "dynapipe-report")


def test_the_examples_run_one_after_another(tmp_path, monkeypatch, capsys):
    """Those that take a second; in the order of `--help`, in which one makes what the next reads."""
    readers_own(tmp_path)
    for name in ("configs", "pretrain_gpt_multitask.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for example in QUICK:
        line, _, file = example.partition(" > ")
        with contextlib.ExitStack() as files:
            if file:
                files.enter_context(contextlib.redirect_stdout(files.enter_context(Path(file).open("w"))))
            words = [match for word in shlex.split(line) for match in (sorted(map(str, Path().glob(word))) or [word])]
            status = main.main(words)
        assert status == 0, f"{example}: {capsys.readouterr()}"
        if file:
            text = Path(file).read_text()
            assert all(map(json.loads, text.splitlines() if file.endswith(".jsonl") else [text]))


def test_patching_as_the_examples_do(tmp_path, monkeypatch, capsys):
    unpack(next(version for version in VERSIONS if "0.19" in version), tmp_path / "Megatron-LM")
    monkeypatch.chdir(tmp_path)
    statuses = [main.main(shlex.split(line)) for line in PATCHES]
    assert statuses[1:] == [0] * (len(PATCHES) - 1), capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_examples_that_train_measure_convert_or_serve(tmp_path: Path) -> None:
    environment = make_workspace(tmp_path)
    readers_own(tmp_path)
    (tmp_path / "data" / "demo").symlink_to("mixture")
    lines = [line for line in EVERY if line not in PATCHES and line not in QUICK]
    lines.sort(key=lambda line: next(place for place, start in enumerate(ORDER) if line.startswith(start)))
    text = "\n".join(f"{PROGRAM} {line}" for line in lines)
    for words, instead in SMALLER:
        assert words in text, f"no example has {words!r} any more"
        text = text.replace(words, instead)
    run_text(text, tmp_path, environment)
