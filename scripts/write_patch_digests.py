"""Writes the digests of a series of patches: what its files are as released, and once patched.

    python scripts/write_patch_digests.py core_v0.19.2 0.19.0=CHECKOUT 0.19.2=CHECKOUT ...

Each CHECKOUT is a folder that holds `megatron/` as it was released under that name. Nothing in it is changed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_dynapipe.checkout.survey import DIGESTS, FOLDER, blob_name, read_patch


def main() -> None:
    """Write the file of one series."""
    folder = FOLDER / sys.argv[1]
    patches = [read_patch(path) for path in sorted(folder.glob("*.patch"))]
    table: dict[str, dict[str, dict[str, object]]] = {patch.file: {} for patch in patches}
    for release, checkout in (argument.split("=", 1) for argument in sys.argv[2:]):
        for name, contents in table.items():
            released = Path(checkout, name).read_bytes()
            own = [str(patch.path.resolve()) for patch in patches if patch.file == name]
            entry = {
                "releases": [],
                "released": blob_name(released),
                "patched": blob_name(patched(name, released, own)),
            }
            contents.setdefault(blob_name(released), entry)["releases"].append(release)  # type: ignore[attr-defined]
    rows = {name: list(contents.values()) for name, contents in sorted(table.items())}
    (folder / DIGESTS).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def patched(name: str, data: bytes, patches: list[str]) -> bytes:
    """A file's content with the patches in it."""
    with tempfile.TemporaryDirectory() as stage:
        Path(stage, name).parent.mkdir(parents=True)
        Path(stage, name).write_bytes(data)
        for patch in patches:
            subprocess.run(["git", "apply", patch], cwd=stage, check=True)
        return Path(stage, name).read_bytes()


if __name__ == "__main__":
    main()
