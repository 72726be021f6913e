"""The compilers of PyTorch's kernels at run time: Triton, whose launchers a C compiler builds against Python.h."""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

HINT = "install gcc and Python's headers (Debian, Ubuntu: apt install gcc python3-dev)"


@functools.cache
def missing_for_kernels() -> str:
    """The first part that is missing here; empty where kernels can be compiled."""
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "C compiler"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else str(header)
