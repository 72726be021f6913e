"""Every flag that the documents name exists: in our parsers, in Megatron's, or in the program named here.

And every name of the package is on the page of its interface.
"""

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_dynapipe
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.megatron.flags import command_line
from tests.helpers.processes import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

OF_OTHERS = {
    "torchrun": "--nproc-per-node --nnodes --node-rank --standalone --master-addr --master-port --rdzv-endpoint"
    " --rdzv-backend --rdzv-id --rdzv-conf --max-restarts",
    "sbatch and srun": "--nodes --signal --partition --account --time --requeue --export",
    "Megatron's dev branch and issues": "--thd-max-packed-sequences --variable-seq-lengths",
    "cibuildwheel": "--platform",
    "pip and list_requirements.py": "--upgrade --no-deps --requirement --without",
    "git": "--first-parent",
    "valkey-server and redis-cli": "--bind --requirepass --maxmemory --maxmemory-policy --scan --pattern",
    "setup.py": "--inplace --force",
    "Megatron's branches main and dev": "--sequence-packing-scheduler --dynamic-context-parallel",
    "mypy": "--strict",
    "scripts of benchmarks/ and examples/": (
        "--quick --demo --output --scale --part --all --check --write --seconds --ranks --minutes --batches --limit"
        " --list --only --over --costs --size --iterations --methods --against --profile-minutes --rounds"
        " --settings --lengths --labels --models --hidden --longest --samples --pairs --warm-up --max-lengths"
    ),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w*{-])")


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Of a parser and its commands' parsers."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)


def flags_of_megatron(rank: int = 0, world_size: int = 1) -> list[str]:
    """All flags of the installed Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    return [*options(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))]


@pytest.fixture(scope="module")
def known() -> set[str]:
    run = argparse.ArgumentParser(allow_abbrev=False)
    command_line.add_arguments(run)
    # Where Megatron's name is `--some_thing`, it also takes `--some-thing`.
    megatron = {flag.replace("_", "-") for flag in run_ranks(flags_of_megatron, 1)[0]}
    others = {flag for flags in OF_OTHERS.values() for flag in flags.split()}
    return {*options(build_parser()), *options(run), *megatron, *others}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_of_a_page_exists(page: Path, known: set[str]) -> None:
    named = set(FLAG.findall(page.read_text()))
    assert named <= known, f"no parser knows {sorted(named - known)}"


def test_the_pages_of_flags_and_commands_are_those_of_the_parsers() -> None:
    written = runpy.run_path(str(ROOT / "scripts/write_reference_pages.py"))["pages"]()
    stale = [path.name for path, text in written.items() if path.read_text() != text]
    assert not stale, f"run python scripts/write_reference_pages.py: {stale}"


def test_the_page_of_the_interface_has_every_name() -> None:
    text = (ROOT / "docs/commands.md").read_text()
    named = set(re.findall(r":: megatron_dynapipe\.[\w.]*\b(\w+)$", text, re.MULTILINE)) | {
        "MegatronPipeline",
        "__version__",
    }
    assert named >= set(megatron_dynapipe.__all__)
