"""The real sources of Megatron that set-up caches: the wheels hold `megatron/core` and `megatron/training`."""

import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = tuple(
    line.partition("==")[2] for line in (ROOT / "megatron_dynapipe" / "patches" / "versions.txt").read_text().split()
)


def wheel(version: str) -> Path:
    """The cached wheel; skips the calling test where set-up could not fetch it."""
    wheels = sorted((ROOT / ".venv" / ".wheels").glob(f"megatron_core-{version}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of megatron-core {version} in .venv/.wheels; scripts/setup.sh fetches it")
    return wheels[0]


def unpack(version: str, folder: Path, only: Collection[str] = ()) -> Path:
    """A fresh checkout in `folder`, made from the wheel: all of Megatron, or only the named files."""
    with zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(folder, only or [name for name in archive.namelist() if name.startswith("megatron/")])
    return folder


def source(version: str, module: str) -> str:
    """The text of one module."""
    with zipfile.ZipFile(wheel(version)) as archive:
        return archive.read(f"{module.replace('.', '/')}.py").decode()
