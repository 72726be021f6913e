"""Digests beside a checkpoint's files: a changed or missing file is named."""

from pathlib import Path

import pytest
import torch

from megatron_dynapipe import digests
from megatron_dynapipe.core.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(digests, "_BLOCK_BYTES", 8)
    for name in ("__0_0.distcp", ".metadata", "sub/optimizer.pt", "dynapipe.json", "empty"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"" if name == "empty" else bytes(range(20)))
    digests.write_digests(tmp_path)
    return tmp_path


def test_files_as_they_were_pass(folder: Path) -> None:
    digests.write_digests(folder)
    digests.check_digests(folder)
    assert digests.NAME not in (folder / digests.NAME).read_text()
    digests.check_digests(folder / "none")  # a checkpoint without digests
    (folder / "empty").unlink()
    with pytest.raises(DataError, match="empty"):
        digests.check_digests(folder)
    for content in ("", "[]", "{", '{"a": 1}'):
        (folder / digests.NAME).write_text(content)
        with pytest.raises(DataError, match="cannot compare the checkpoint"):
            digests.check_digests(folder)


@pytest.mark.parametrize("place", [0, 7, 8, 19])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "sub/optimizer.pt", "dynapipe.json"])
def test_one_bit_is_found_by_one_of_the_ranks(folder: Path, name: str, place: int) -> None:
    content = bytearray((folder / name).read_bytes())
    content[place] ^= 1
    (folder / name).write_bytes(content)
    said = []
    for rank in range(3):
        try:
            digests.check_digests(folder, rank=rank, ranks=3)
        except DataError as error:
            said.append(str(error))
    assert len(said) == 1 and f"found others under {name}\n" in said[0]


def test_archives_are_compared_with_the_checksums_in_them(tmp_path: Path) -> None:
    """torch reads a changed one without a word."""
    path, saved = tmp_path / "iter_0000003_0_local.pt", torch.arange(4000.0)
    torch.save({"weight": saved}, path)
    digests.check_archives(tmp_path)
    whole = path.read_bytes()
    place = whole.index(saved[7:9].numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert not torch.equal(torch.load(path)["weight"], saved)
    for content in (path.read_bytes(), whole[:-30], b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"0_local.pt: expected the file that was saved, found another"):
            digests.check_archives(tmp_path)
