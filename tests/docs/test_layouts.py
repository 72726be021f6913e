"""Every flag of ours in the tables of layouts and attention is run by a test, or its row says that it was read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"`(--dynapipe-[a-z-]+(?: [^`]+)?)`")
READ = "Read, not run"
LAYOUTS = (ROOT / "docs/parallelism.md").read_text().partition("## What works\n")[2].partition("\n## ")[0]
ATTENTION = (ROOT / "docs/micro-batches.md").read_text().partition("## Padded and packed\n")[2].partition("\n## ")[0]
ROWS = [row for row in (LAYOUTS + ATTENTION).splitlines() if row.startswith("|") and FLAG.search(row)]
RUN_BY = {
    # a flag as it stands there: the test's file, and how the flag stands in what it runs
    "--dynapipe-layers-per-stage": (
        "megatron/flags/test_command_line.py",
        "--pipeline-model-parallel-layout Ett|ttL",
    ),
    "--dynapipe-attention megatron": (
        "megatron/flags/test_command_line.py",
        "--train-iters 2 --dynapipe-attention megatron",
    ),
    # the default, in rows of layers of Transformer Engine
    "--dynapipe-attention auto": ("rehearsal/test_training.py", "tensorwise --dynapipe-layout packed"),
    "--dynapipe-layers-per-stage 5,3": ("megatron/entry/test_hybrid.py", "--dynapipe-layers-per-stage 3,2,1,2"),
    "--dynapipe-layers-per-stage 4.5,3.5": (
        "megatron/entry/test_checkpoints.py",
        "--dynapipe-layers-per-stage 2.5,1.5",
    ),
    "--dynapipe-layers-per-stage auto": ("megatron/entry/test_hybrid.py", "--dynapipe-layers-per-stage auto"),
    "--dynapipe-timeout-s": ("megatron/entry/test_failure.py", "--dynapipe-timeout-s"),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_flags_of_a_row_are_run_or_read(row: str) -> None:
    for flag in FLAG.findall(row):
        if READ not in row:
            file, words = RUN_BY[flag]
            assert words in (ROOT / "tests" / file).read_text(), f"{file} runs {flag} no more"


def test_no_flag_is_named_that_no_row_has() -> None:
    assert {flag for row in ROWS if READ not in row for flag in FLAG.findall(row)} == RUN_BY.keys()
