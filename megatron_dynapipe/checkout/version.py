"""Which Megatron is here, read without importing it.

What is accepted does not depend on the version it says: a run checks what it relies on when it starts.
"""

import importlib.util
import re
import sys
from pathlib import Path

from megatron_dynapipe.core.errors import UnsupportedMegatronError

PACKAGE = "megatron-core[training]==0.19.2"
"""The release that pip installs where there is none: the newest release that the tests train with."""
INSTALL_HINT = f"pip install '{PACKAGE}', or put a checkout of a known release first on PYTHONPATH (patches/README.md)"


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
    return list(dict.fromkeys(folder.resolve() for folder in folders if (folder / "core" / "package_info.py").exists()))


def version_of(package_info: Path) -> str:
    """The version that a `package_info.py` says."""
    text = package_info.read_text(encoding="utf-8")
    numbers = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    release = re.search(r"^PRE_RELEASE = [\"'](\w*)[\"']", text, re.MULTILINE)
    return ".".join(number[1] if number else "?" for number in numbers) + (release[1] if release else "")


def found_version() -> str:
    """The version that an import would find; what it can do is checked when a run starts (`hooks.compatibility`).

    Raises:
        UnsupportedMegatronError: there is no Megatron.
    """
    version = find_version()
    if version is None:
        raise UnsupportedMegatronError("expected megatron-core, found none", hint=f"pip install '{PACKAGE}'")
    return version
