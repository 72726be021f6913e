"""A layer split is chosen once for the same run, and again where anything that it depends on is another."""

import os
import re

from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset

CHOSEN = re.compile(r"layers per stage: ([\d.,]+)(.*)")


def test_a_split_is_kept_for_the_next_start_of_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = make_dataset(tmp_path / "data", lengths=(1, 3), tasks=("one", "two"), rates=(1.0, 0.5))
    flags = "--dynapipe-layers-per-stage auto --pipeline-model-parallel-size 2 --train-iters 1"

    def start(more: str = "") -> tuple[str, str]:
        runs = entry_scripts.train("t5", data, f"{flags} {more}", ranks=2, report=tmp_path / "report")
        (said,) = CHOSEN.findall(runs[0]["stdout"])
        return said

    split, why = start()
    assert why == ""
    (file,) = (tmp_path / "cache" / "megatron-dynapipe").glob("split-*.txt")
    assert file.read_text().strip() == split
    assert start() == (split, " (chosen at an earlier start of the same run)")
    assert start("--dynapipe-device-memory-limit 30000")[1] == ""
    file.write_bytes(os.urandom(8))
    assert start() == (split, "")
