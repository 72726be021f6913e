"""Writes requirements.sha256: the digests of the wheels that set-up installs on Linux x86-64, as the registry has them.

python scripts/write_hashes.py        # asks pip for its report of what it would install, and installs nothing
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = "requirements.lock"
PYTHONS = ("3.12", "3.13")
TARGET = "requirements.sha256"
_HEADER = "# sha256 of the wheels of requirements.lock, for Linux x86-64: scripts/write_hashes.py wrote it.\n"
_TAGS = ("linux", "manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))


def hashes(lock: Path, python: str) -> set[str]:
    """Lines "name==version sha256:…" of what pip would install of a lock file."""
    platforms = [word for tag in _TAGS for word in ("--platform", f"{tag}_x86_64")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--only-binary=:all:", "--target", folder, "--python-version", python, *platforms]
        subprocess.run([*command, "--report", str(report), "-r", str(lock)], check=True, timeout=1800)
        installs = json.loads(report.read_text())["install"]
    return {
        f"{each['metadata']['name'].lower().replace('_', '-').replace('.', '-')}=={each['metadata']['version']}"
        f" sha256:{each['download_info']['archive_info']['hashes']['sha256']}"
        for each in installs
    }


def main() -> None:
    """Write the file anew."""
    lines = {line for python in PYTHONS for line in hashes(ROOT / LOCK, python)}
    (ROOT / TARGET).write_text(_HEADER + "".join(f"{line}\n" for line in sorted(lines)))


if __name__ == "__main__":
    main()
