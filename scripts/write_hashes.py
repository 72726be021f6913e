"""Writes requirements.sha256: the digests of what set-up installs on Linux x86-64, as the registry has them.

python scripts/write_hashes.py        # asks pip for its report of what it would install, and installs nothing
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = {
    "requirements.lock": ("3.12", "3.13"),
    "requirements-oldest.lock": ("3.12", "3.13"),
    "requirements-bridge.lock": ("3.12",),  # as Megatron-Bridge has it
}
"""Lock files, and the versions of Python that each is for."""
SOURCES = ("antlr4-python3-runtime",)
"""Packages that the registry has no wheels of."""
TARGET = "requirements.sha256"
_HEADER = "# sha256 of what the lock files name, for Linux x86-64: scripts/write_hashes.py wrote it.\n"
_TAGS = ("linux", "manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))


def hashes(lock: Path, python: str) -> set[str]:
    """Lines "name==version sha256:…" of what pip would install of a lock file."""
    platforms = [word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")]
    pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    sources = [pin for pin in pins if pin.partition("==")[0] in SOURCES]
    wheels = [pin for pin in pins if pin not in sources]
    found = reported(wheels, "--only-binary=:all:", "--python-version", python, *platforms)
    return found | (reported(sources) if sources else set())


def reported(pins: Sequence[str], *options: str) -> set[str]:
    """The lines for these pins."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--target", folder, "--report", str(report), *options, *pins]
        subprocess.run(command, check=True, timeout=1800)
        installs = json.loads(report.read_text())["install"]
    return {
        f"{each['metadata']['name'].lower().replace('_', '-').replace('.', '-')}=={each['metadata']['version']}"
        f" sha256:{each['download_info']['archive_info']['hashes']['sha256']}"
        for each in installs
    }


def main() -> None:
    """Write the file anew."""
    lines = {line for lock, pythons in LOCKS.items() for python in pythons for line in hashes(ROOT / lock, python)}
    (ROOT / TARGET).write_text(_HEADER + "".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
