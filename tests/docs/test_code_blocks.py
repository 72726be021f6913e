"""Every code block of the README and the quick starts is run, or parsed where it needs what is not here."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import UsageError, build_parser
from tests.helpers.random_dataset import make_dataset

ROOT = Path(__file__).parents[2]

RUN, SLOW = "run", "run, slowly"
BLOCKS: dict[str, tuple[str, ...]] = {
    # One entry per block, in order: RUN, SLOW, or why it is only parsed.
    "README.md": (
        "make demo and make test are what continuous integration and the other tests run",
        "installs packages; tests/installed and the wheels' own run hold its outcome",
        "needs 8 GPUs",
        "Python, a part of examples/any_module.py, which tests/examples runs",
        "its files are the reader's; tests/cli and tests/data run each command",
        "takes minutes; tests/cli/test_three_commands.py runs this way",
        "needs a checkpoint of HuggingFace's; tests/integration/conversion runs it on small ones",
    ),
    "docs/quick-start/one-machine.md": ("installs packages", "installs packages", RUN, SLOW),
    "docs/quick-start/gpus.md": ("needs a GPU", "needs 8 GPUs", "needs a GPU", "needs Docker and GPUs"),
    "docs/quick-start/several-nodes.md": ("needs two nodes", "needs Slurm", "needs an address of this network"),
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = "megatron-dynapipe"


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return FENCE.findall((ROOT / page).read_text())


CASES = [(page, index, how) for page, hows in BLOCKS.items() for index, how in enumerate(hows)]


def test_the_table_has_every_block() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/quick-start").glob("*.md")))]
    assert {page: len(blocks(page)) for page in pages} == {page: len(BLOCKS.get(page, ())) for page in pages}


@pytest.mark.parametrize(("page", "index"), [case[:2] for case in CASES])
def test_a_block_parses(page: str, index: int) -> None:
    language, text = blocks(page)[index]
    if language == "python":
        compile(text, page, "exec")
        return
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    for argv in commands(text):
        build_parser().parse_args(argv)
    files = [word for word in shlex.split(text, comments=True) if word.startswith(("configs/", "examples/", "docker/"))]
    assert not [file for file in files if not (ROOT / file).exists()]


def commands(text: str) -> list[list[str]]:
    """Arguments of every call of our program; what stands in a here-document is none."""
    text = re.sub(r"<<(\w+)\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in text.splitlines()]
    return [argv[1:] for argv in words if argv[:1] == [PROGRAM]]


MARKED = [
    pytest.param(page, index, marks=[pytest.mark.slow] if how == SLOW else [], id=f"{page}:{index}")
    for page, index, how in CASES
    if how in (RUN, SLOW)
]


@pytest.mark.parametrize(("page", "index"), MARKED)
def test_a_block_runs(tmp_path: Path, page: str, index: int) -> None:
    """In a folder with what a checkout has, this interpreter's programs, and a small dataset for the demo's."""
    for name in ("benchmarks", "configs", "pretrain_gpt_multitask.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    make_dataset(tmp_path / ".demo" / "data")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in ((PROGRAM, "megatron_dynapipe"), ("torchrun", "torch.distributed.run")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "-euo", "pipefail", "-c", blocks(page)[index][1]],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_broken_block_is_noticed() -> None:
    (argv,) = commands(
        "cat > x <<END\nmegatron-dynapipe nothing\nEND\nmegatron-dynapipe plan \\\n  --bathces x  # no\n"
    )
    assert argv == ["plan", "--bathces", "x"]
    with pytest.raises(UsageError, match="required"):
        build_parser().parse_args(argv)
