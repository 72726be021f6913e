"""Layers per stage that a run plans for itself."""

import re

from tests.integration import entry


def test_a_t5_plans_its_split(tmp_path):
    """Inputs of one or two tokens: the stage of the decoder and the head gives a layer to the encoder's."""
    data = entry.make_dataset(tmp_path / "data", lengths=(1, 3), target=20)
    flags = "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage auto --train-iters 2"
    runs = entry.train("t5", data, flags, ranks=2, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
    split = re.search(r"layers per stage: (\d+),(\d+)", runs[0]["stdout"])
    assert split is not None and (split[1], split[2]) == ("3", "1")


def test_a_gpt_plans_its_split(tmp_path):
    """Five layers over two stages: the stage with the head and the loss, of many words, has the fewer."""
    data = entry.make_dataset(tmp_path / "data")
    flags = "--num-layers 5 --pipeline-model-parallel-size 2 --dynapipe-layers-per-stage auto --train-iters 2"
    runs = entry.train("gpt", data, flags, ranks=2, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
    split = re.search(r"layers per stage: (\d+),(\d+)", runs[0]["stdout"])
    assert split is not None and int(split[1]) + int(split[2]) == 5 and int(split[1]) > int(split[2])


def test_one_stage_has_all_layers(tmp_path):
    data = entry.make_dataset(tmp_path / "data")
    flags = "--dynapipe-layers-per-stage auto --train-iters 1"
    runs = entry.train("gpt", data, flags, ranks=1, report=tmp_path / "report")
    assert "layers per stage: 4" in runs[0]["stdout"]
