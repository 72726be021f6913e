"""Writes the digests of a series of patches: what its files are as released, and once patched.

    python scripts/write_patch_digests.py core_v0.19.2 0.19.0=CHECKOUT 0.19.2=CHECKOUT ...

Each CHECKOUT is a folder that holds `megatron/` as it was released under that name. Nothing in it is changed.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_dynapipe.patching.series import DIGESTS, FOLDER, Patch, digest


def main() -> None:
    """Write the file of one series."""
    folder = FOLDER / sys.argv[1]
    patches = [Patch.read(path) for path in sorted(folder.glob("*.patch"))]
    known: dict[str, dict[str, dict[str, object]]] = {name: {} for patch in patches for name in patch.files}
    for release, checkout in (word.split("=", 1) for word in sys.argv[2:]):
        with tempfile.TemporaryDirectory() as stage:
            for name in known:
                Path(stage, name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(checkout, name), Path(stage, name))
            for patch in patches:
                subprocess.run(["git", "apply", str(patch.path.resolve())], cwd=stage, check=True)
            for name, contents in known.items():
                before, after = Path(checkout, name).read_bytes(), Path(stage, name).read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(before) + before).hexdigest()
                entry = {"releases": [], "blob": blob, "before": digest(before), "after": digest(after)}
                contents.setdefault(digest(before), entry)["releases"].append(release)  # type: ignore[attr-defined]
    table = {name: list(contents.values()) for name, contents in sorted(known.items())}
    (folder / DIGESTS).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
