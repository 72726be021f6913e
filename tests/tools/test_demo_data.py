"""The demo mixture out of the standard library: what the samples are, and what the dataset promises."""

from pathlib import Path

import numpy as np
import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.meta import SPLITS, read_meta
from megatron_dynapipe.sampling import LengthTable, read_task_ids
from megatron_dynapipe.tools import demo_data as demo
from megatron_dynapipe.tools.demo_data import (
    MAX_INPUT_LENGTH,
    MAX_TARGET_LENGTH,
    VOCABULARY_SIZE,
    build_demo,
    samples_of_source,
    stdlib_samples,
)
from megatron_dynapipe.tools.prepare import TextSample
from tests.tools.prepare.test_run import text_samples

SOURCE = '''"""Shapes and areas.

More about them.
"""

import math

class Circle:
    """A round thing."""

    def area(self, scale: float = 1.0) -> float:
        """Return the area, scaled.

        The second paragraph.
        """
        return scale * math.pi

def nothing():
    """Does nothing at all."""

async def wait(*steps):
    "short"
    pass
'''


def test_samples_of_a_source_file() -> None:
    samples = list(samples_of_source(SOURCE.encode()))
    module, *functions = samples
    assert module.task == "module_summary"
    assert module.input.startswith("summarize module:\nimport math\n\nclass Circle:")
    assert module.target == "Shapes and areas."
    # breadth first, as `ast.walk` goes: functions of the module, then methods; "short" says too little
    assert functions == [
        TextSample("signature", "write signature:\nDoes nothing at all.", "def nothing()"),
        TextSample("signature", "write signature:\nshort", "def wait(*steps)"),
        TextSample(
            "signature", "write signature:\nReturn the area, scaled.", "def area(self, scale: float=1.0) -> float"
        ),
        TextSample(
            "function_summary",
            "summarize function:\ndef area(self, scale: float = 1.0) -> float:\n    return scale * math.pi",
            "Return the area, scaled.",
        ),
    ]


def test_long_modules_are_cut_at_a_line_and_some_files_give_nothing() -> None:
    source = '"""A module of many lines."""\n' + "".join(f"value_{at} = {at}\n" for at in range(1000))
    for nothing in (b"def (", b"\xff\xfe", b"x = 1", b"\x00"):
        assert list(samples_of_source(nothing)) == []
    (sample,) = samples_of_source(source.encode())
    assert len(sample.input) < 4100
    last = sample.input.splitlines()[-1]
    name, _, value = last.partition(" = ")
    assert name == f"value_{value}"


def test_skips_tests_and_installed_packages_the_same_way_each_time(tmp_path: Path) -> None:
    for folder in ("lib", "test", "site-packages/other", "idlelib"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(SOURCE.replace("Shapes", f"Shapes of {folder}"))
    samples = stdlib_samples(100, tmp_path)
    assert stdlib_samples(100, tmp_path) == samples, "the same each time"
    with pytest.raises(DataError, match=r"expected the source of Python's standard library in .*, found none for func"):
        stdlib_samples(10, tmp_path / "none")
    assert [sample.target for sample in samples if sample.task == "module_summary"] == ["Shapes of lib and areas."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of set-up, where this Python built one; else a new one, which takes a while."""
    made = Path(__file__).parents[2] / ".demo" / "data"
    folder = made if demo._up_to_date(made) else tmp_path_factory.mktemp("demo") / "data"
    build_demo(folder)
    return folder


def test_demo_is_a_mixture_of_different_lengths(folder: Path) -> None:
    meta = read_meta(folder)
    assert meta.tasks == ("function_summary", "module_summary", "signature")
    assert meta.vocabulary_size == VOCABULARY_SIZE
    assert meta.split_samples["train"] > 3000
    assert min(meta.split_samples.values()) > 100
    lengths = LengthTable.read(folder, "train")
    assert 10 <= np.median(lengths.input) < 100
    assert lengths.input.max() > 1000
    for each in (LengthTable.read(folder, split) for split in SPLITS):
        assert each.input.max() <= MAX_INPUT_LENGTH and each.target.max() <= MAX_TARGET_LENGTH
    tasks = read_task_ids(folder, "train", len(lengths))
    medians = [float(np.median(lengths.input[tasks == task])) for task in range(3)]
    assert medians[2] * 2 < medians[0] < medians[1] / 4


def test_demo_is_made_once_for_each_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "stdlib_samples", text_samples)
    monkeypatch.setattr(demo, "SAMPLES_PER_TASK", 40)
    monkeypatch.setattr(demo, "VOCABULARY_SIZE", 300)
    build_demo(tmp_path / "data")
    made = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    build_demo(tmp_path / "data")
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == made
    monkeypatch.setattr(demo, "demo_source", lambda: "another Python")
    build_demo(tmp_path / "data")
    assert read_meta(tmp_path / "data").source == "another Python"
