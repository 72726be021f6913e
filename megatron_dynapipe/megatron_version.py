"""Which Megatron is here, read without importing it, and which versions are known."""

import importlib.util
import re
import sys
from pathlib import Path

from megatron_dynapipe.errors import UnsupportedMegatronError

KNOWN_VERSIONS = ("0.18.2", "0.19.1", "0.19.2")
"""Versions of megatron-core, as its own `package_info.py` says, with which the tests train.

0.19.1 is what the tag core_v0.19.0 says of itself; the modules that are replaced or patched are those of 0.19.2.
"""


def find_version() -> str | None:
    """The version of the Megatron that an import would find: a checkout on the path, or the installed wheel."""
    megatron = importlib.util.find_spec("megatron")
    for folder in (megatron and megatron.submodule_search_locations) or ():
        file = Path(folder) / "core" / "package_info.py"
        if file.exists():
            return version_of(file)
    return None


def megatron_folders() -> list[Path]:
    """Every Megatron on the path, the one that an import takes first."""
    folders = (Path(entry or ".") / "megatron" for entry in sys.path)
    return list(dict.fromkeys(each.resolve() for each in folders if (each / "core" / "package_info.py").exists()))


def version_of(package_info: Path) -> str:
    """The version that a `package_info.py` says."""
    text = package_info.read_text(encoding="utf-8")
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    release = re.search(r"^PRE_RELEASE = [\"'](\w*)[\"']", text, re.MULTILINE)
    return ".".join(number[1] if number else "?" for number in numbers) + (release[1] if release else "")


def check_version() -> str:
    """The version found.

    Raises:
        UnsupportedMegatronError: there is no Megatron, or its version is not a known one.
    """
    version, known = find_version(), ", ".join(KNOWN_VERSIONS)
    if version is None:
        raise UnsupportedMegatronError(
            f"expected megatron-core of one of the versions {known}, found none",
            hint=f'pip install "megatron-core[training]=={KNOWN_VERSIONS[-1]}"',
        )
    if version not in KNOWN_VERSIONS:
        raise UnsupportedMegatronError(
            f"expected megatron-core of one of the versions {known}, found {version}",
            hint="install one of these versions, or put a checkout of one first on PYTHONPATH",
        )
    return version
