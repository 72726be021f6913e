"""Every command that a page, a file's head, an error or a log prints is run as it stands, or named with a reason.

Blocks of the README and the quick starts, and what `convert` writes, are in `test_code_blocks`; `--help` and
docs/commands.md in `cli/test_examples`.
"""

import re
from pathlib import Path

import pytest

from tests.cli.test_examples import readers_own
from tests.docs.printed import printed
from tests.docs.test_code_blocks import BLOCKS, Runs
from tests.docs.workspace import PROGRAM, make_workspace, run_text

DEMO = "--model-config configs/demo_gpt.yaml --pipeline-parallel 2 --device-memory-mb 4000"

NOT_RUN = {
    # What a command begins with, and why it is not run, or where.
    r"make |python benchmarks/gpu": "sets up, and takes minutes; tests/test_setup.py holds set-up",
    r"pip ": "installs from a registry; tests/installed holds what each extra brings",
    r"git |\.venv/bin/|python -m build|python scripts/": "for who changes this project or a checkout of Megatron",
    r"(OMP_NUM_THREADS=1 )?(python (-m )?benchmarks|torchrun .* -m benchmarks)": "measures for minutes to hours;"
    " tests/benchmarks holds the code",
    r"(torchrun .*)?pretrain_gpt.py|torchrun .*\.cpu|megatron-dynapipe patch |MEGATRON_CHECKOUT": "needs a checkout of"
    " Megatron-LM; cli/test_examples patches one, patches/test_training.py trains in one",
    r"python -m (varuna|verl)": "another project's",
    r"megatron-dynapipe certify -- FLAGS": "no whole line; tests/tools/certify runs one",
    r"megatron-dynapipe certify --ranks": "of a script that needs Megatron-Bridge; bridge/test_certify.py runs one",
    r"megatron-dynapipe (COMMAND|plan --output FOLDER$)|python -m megatron_dynapipe C": "no whole line",
    r".*--validate 100": "trains for hours; the shorter line of docs/tuning.md is run",
    r"torchrun (--nnodes|--nproc-per-node [48] pretrain|… --dynapipe)": "needs 4 to 32 GPUs; tests/configs takes each"
    " run file through Megatron's checks on so many ranks, and plans for its cluster",
    r"torchrun (\{\}|--standalone) --nproc-per-node (\{\}|8)": "of the layout that `tune` has found; cli/test_tune.py",
    r"megatron-dynapipe data prepare --mixture configs/data": "downloads; configs/test_mixtures.py reads local copies",
    r"megatron-dynapipe tune .*--model-config recipe.yaml": "of a recipe that Megatron-Bridge saves; cli/test_tune.py",
    r"megatron-dynapipe profile --model-config": "with Megatron-Bridge's adapters; megatron/bridge/test_measured.py",
    r"torchrun with `-m": "no whole line; docs/cost-models.md has it",
}
RUN = {
    rf"{PROGRAM} compare --batches": Runs(swaps=(("--limit 6", "--limit 1"),)),
    rf"{PROGRAM} orchestrate": Runs(slow=False),
    rf"{PROGRAM} tune --model-config configs/qwen3": Runs(swaps=(("--limit 14", "--limit 1"),)),
    rf"{PROGRAM} plan --data .demo/data": Runs(slow=False),
    rf"{PROGRAM} plan --data data/mixture": Runs(
        swaps=(("--model gpt …", DEMO), ("FILE.plan", "iteration-0.plan")), slow=False
    ),
    rf"{PROGRAM} (cost-model|report|data verify|data demo)": Runs(
        swaps=(
            ("FILE", "costs.json"),
            ("check {}", "check costs.json"),
            ("RUN_DIR", "dynapipe-report"),
            ("report {}", "report dynapipe-report"),
            ("DIR", ".demo/data"),
        ),
        slow=False,
    ),
    r"torchrun --nproc-per-node \d examples/": Runs(),
    rf"{PROGRAM} certify -- --": Runs(),
    rf"{PROGRAM} profile": Runs(
        swaps=(
            ("--output t5.json", "--output t5.json --budget-minutes 0.2"),
            ("--model {} --output costs.json", "--model gpt --output gpt.json --budget-minutes 0.2"),
            ("-- FLAGS", "-- --dynapipe-config configs/demo_gpt.yaml"),
        )
    ),
    r"torchrun .* profile": Runs(
        swaps=(("…", "--model gpt --output tp.json --budget-minutes 0.2 -- --dynapipe-config configs/demo_gpt.yaml"),)
    ),
    rf"{PROGRAM} data prepare --mixture mixture": Runs(swaps=(("[--tokenizer TOKENIZER]", "--tokenizer TOKENIZER"),)),
    rf"{PROGRAM} tune .*--validate 3": Runs(
        swaps=(
            ("--devices 8 --device-memory-mb 36000", "--devices 2 --device-memory-mb 4000"),
            ("--validate 3", "--validate 1 --validate-iterations 2"),
        )
    ),
    rf"{PROGRAM} tune .*--write-config": Runs(
        swaps=(
            ("--model gpt --layers 32 --hidden-size 4096 --devices 64", "--model-config model.yaml --devices 2"),
            ("--device-memory-mb 36000", "--device-memory-mb 4000"),
            ("torchrun …", "torchrun --nproc-per-node 2"),
        )
    ),
    r"torchrun .*--dynapipe-config …": Runs(swaps=(("…", "configs/demo_t5.yaml"),)),
    r"torchrun --nproc-per-node [12] pretrain": Runs(),
}
"""What a command begins with, and how it is run: with small run files, data and models (`workspace`)."""
FOUND = printed({*BLOCKS, "docs/commands.md"})


def how(command: str) -> Runs | str:
    entries = [entry for table in (NOT_RUN, RUN) for start, entry in table.items() if re.match(start, command)]
    assert entries, f"{FOUND[command]} prints {command!r}: say in the tables above how it is run, or why not"
    return entries[0]


def test_every_command_is_in_the_tables() -> None:
    for command in FOUND:
        how(command)
    unused = [start for start in (*NOT_RUN, *RUN) if not any(re.match(start, command) for command in FOUND)]
    assert not unused, "nothing prints these any more"


RUNS = {command: of for command in sorted(FOUND) if isinstance(of := how(command), Runs)}


def run(commands: dict[str, Runs], folder: Path) -> None:
    environment = make_workspace(folder)
    readers_own(folder)
    (folder / "costs.json").write_text((folder / "cost-model.json").read_text())
    (folder / "batches.json").symlink_to("BATCHES.json")
    (folder / "model.yaml").symlink_to("configs/demo_gpt.yaml")
    for command, of in commands.items():
        for words, instead in of.swaps:
            command = command.replace(words, instead)
        run_text(command, folder, environment)


@pytest.mark.timeout(300)
def test_commands_of_seconds_run(tmp_path: Path) -> None:
    run({command: of for command, of in RUNS.items() if not of.slow}, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [pytest.param(command, id=command[:90]) for command, of in RUNS.items() if of.slow])
def test_a_command_runs(tmp_path: Path, command: str) -> None:
    run({command: RUNS[command]}, tmp_path)
