"""Layers per stage that a run plans for itself."""

import re

from tests.integration import entry


def test_a_run_plans_its_split(tmp_path):
    """Inputs of one or two tokens: the stage of the decoder and the head gives a layer to the encoder's."""
    data = entry.make_dataset(tmp_path / "data", lengths=(1, 3), target=20)
    flags = "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage auto --train-iters 2"
    runs = entry.train("t5", data, flags, ranks=2, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
    split = re.search(r"layers per stage: (\d+),(\d+)", runs[0]["stdout"])
    assert split is not None and (split[1], split[2]) == ("3", "1")
