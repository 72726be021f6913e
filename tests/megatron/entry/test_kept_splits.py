"""A layer split is chosen once for the same run, and again where anything that it depends on is another."""

import os
import re
import shutil
from pathlib import Path

import pytest

import megatron_dynapipe
from megatron_dynapipe.megatron.entry.kept_splits import code_digest
from tests.helpers import entry_scripts
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

CHOSEN = re.compile(r"layers per stage: ([\d.,]+)(.*)")


def started(rank: int, world_size: int, cache: str, argv: list[str]) -> str:
    """What a start prints whose cache folder lies elsewhere."""
    os.environ["XDG_CACHE_HOME"] = cache
    run = entry_scripts.run_entry(
        rank=rank, world_size=world_size, script=entry_scripts.script_of("t5"), argv=argv, kill=None, pictures=False
    )
    return run["stdout"]


def test_a_split_is_kept_for_the_next_start_of_the_same_run(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", lengths=(1, 3), tasks=("one", "two"), rates=(1.0, 0.5))
    flags = "--dynapipe-layers-per-stage auto --pipeline-model-parallel-size 2 --train-iters 1"

    def start(more: str = "") -> tuple[str, str]:
        argv = entry_scripts.words("t5", data, f"{flags} {more}", report=tmp_path / "report")
        said = run_ranks(started, 2, {"cache": str(tmp_path / "cache"), "argv": argv}, deadline_s=240)
        (chosen,) = CHOSEN.findall(said[0])
        return chosen

    split, why = start()
    assert why == ""
    (file,) = (tmp_path / "cache" / "megatron-dynapipe").glob("split-*.txt")
    assert file.read_text().strip() == split
    assert start() == (split, " (chosen at an earlier start of the same run)")
    file.write_bytes(os.urandom(8))
    assert start() == (split, "")
    assert start("--seed 77")[1] == ""


@pytest.mark.parametrize("changed", ["choosing/layer_split.py", "ways/pieces.py", "core/_native.so", "a_new_room.py"])
def test_an_upgrade_chooses_anew_wherever_the_choice_is_made(tmp_path: Path, changed: str) -> None:
    package = tmp_path / "package"
    shutil.copytree(Path(megatron_dynapipe.__path__[0]), package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(package)
    assert before == code_digest(Path(megatron_dynapipe.__path__[0]))
    with (package / changed).open("a") as file:
        file.write("# better\n")
    assert code_digest(package) != before
