"""The mixtures in `configs/data/`, on small stand-ins of the same form."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.tools.mixture.spec import read_mixture

MIXTURES = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


def test_every_mixture_reads() -> None:
    assert MIXTURES
    for path in MIXTURES:
        assert read_mixture(path).tasks


def test_flan_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (path,) = (path for path in MIXTURES if path.name == "flan_like.yaml")
    for place, task in enumerate(read_mixture(path).tasks):
        rows = [
            {"inputs": f"question {at}", "targets": f"{at}", "task_name": f"task {place}.{at % 2}", "_template_idx": at}
            for at in range(40)
        ]
        folder = tmp_path / "hub" / str(task.hub) / "data"
        folder.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    command = ["data", "prepare", "--mixture", str(path), "--hub-root", str(tmp_path / "hub")]
    assert main([*command, "--output", str(tmp_path / "data"), "--vocabulary-size", "270"]) == 0, capsys.readouterr()
    meta = read_meta(tmp_path / "data")
    assert len(meta.tasks) == 10
    assert sum(meta.split_samples.values()) == 200
    assert [round(meta.rates[f"task {at}.0"] + meta.rates[f"task {at}.1"], 6) for at in range(5)] == [
        0.40, 0.32, 0.20, 0.05, 0.03
    ]  # fmt: skip
