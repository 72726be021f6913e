"""Builds the rehearsal's two libraries with the machine's C++ compiler, once for each state of their sources."""

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).parents[3] / "build" / "rehearsal"
MODULE = "rehearsal_device"
COMPILER = shutil.which("g++")


def libraries() -> Path:
    """The folder that holds `rehearsal_device.so` and `libnvidia-ml.so.1`; made at the first call, in 15 seconds."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None and COMPILER is not None
    torch = Path(spec.origin).parent
    digest = hashlib.sha256((torch / "version.py").read_bytes())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            _build(torch, folder)
            (folder / "done").touch()
    return folder


def _build(torch: Path, folder: Path) -> None:
    include = [SOURCES, torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    flags = [f"-I{path}" for path in include] + f"-std=c++20 -O0 -fPIC -w -DTORCH_EXTENSION_NAME={MODULE}".split()
    # One unit of all sources: PyTorch's headers take nine seconds to read.
    sources = "".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    library = folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    _run(*flags, "-shared", "-x", "c++", "-", *link, "-o", str(library), stdin=sources)
    _run("-shared", "-fPIC", "-x", "c", str(SOURCES / "nvml.c"), "-o", str(folder / "libnvidia-ml.so.1"))


def _run(*words: str, stdin: str = "") -> None:
    subprocess.run([str(COMPILER), *words], input=stdin, text=True, check=True, stdout=sys.stderr)
