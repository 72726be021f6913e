"""`manifest.json`: round trip, strictness, and opening a split against it."""

import json
import os
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import manifest_path
from megatron_dynapipe.data.meta import open_split, read_meta
from tests.data.dataset import SAMPLES, write_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path)


def change(folder: Path, **changes: object) -> None:
    """Rewrite manifest.json with fields changed, or removed where the value is None."""
    fields = json.loads(manifest_path(folder).read_bytes()) | changes
    manifest_path(folder).write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_opens_a_split(folder: Path) -> None:
    reader = open_split(folder, "train")
    assert [(inputs.tolist(), targets.tolist()) for inputs, targets in map(reader.__getitem__, range(4))] == SAMPLES
    assert len(open_split(folder, "valid")) == 0
    assert read_meta(folder).tasks == ("even", "odd")
    assert manifest_path(folder).read_text().count("\n") > 10, "for people to read"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "dynapipe-dataset/4"}, "Invalid enum value 'dynapipe-dataset/4' - at `$.format`"),
        ({"surprise": 1}, "Object contains unknown field `surprise`"),
        ({"tasks": None}, "Object missing required field `tasks`"),
        ({"vocabulary_size": 0}, "Expected `int` >= 1 - at `$.vocabulary_size`"),
        ({"samples": {"train": {"even": 4}}}, "expected samples of train, valid, test, got train"),
        ({"tasks": ["even", "odd\x1b[2J"]}, "names of tasks of printable characters, got 'odd\\x1b[2J'"),
        ({"pad_id": "0"}, "Expected `int`, got `str` - at `$.pad_id`"),
    ],
)
def test_meta_is_strict(folder: Path, changes: dict[str, object], message: str) -> None:
    change(folder, **changes)
    with pytest.raises(DataError, match=r"manifest\.json: expected dynapipe-dataset/3") as caught:
        read_meta(folder)
    assert message in str(caught.value)


def test_what_is_no_dataset(folder: Path) -> None:
    with pytest.raises(DataError, match=r"expected a split of train, valid, test, got 'dev'"):
        open_split(folder, "dev")
    change(folder, samples={"train": {"even": 5}, "valid": {}, "test": {}})
    with pytest.raises(DataError, match=r"train: expected 5 samples as manifest\.json says, got 4"):
        open_split(folder, "train")
    manifest_path(folder).write_bytes(b"{")
    with pytest.raises(DataError, match=r"manifest\.json: expected dynapipe-dataset/3: Input data was truncated"):
        read_meta(folder)
    manifest_path(folder).unlink()
    with pytest.raises(DataError, match=r"expected a dataset folder with a manifest\.json"):
        read_meta(folder)
    os.mkfifo(manifest_path(folder))
    with pytest.raises(DataError, match="expected a regular file, found a pipe"):
        read_meta(folder)
    with pytest.raises(DataError, match=r"expected a dataset folder at .*nowhere, found none[\s\S]*data prepare"):
        read_meta(folder / "nowhere")
