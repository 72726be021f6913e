"""The build backend: setuptools, and a C++ compiler as a build requirement where the machine has none that works.

Run as a script it prints that requirement, if there is one: set-up builds without pip's own environment for builds.
"""

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Mapping

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - a backend is a module with the hooks of PEP 517 and PEP 660

ZIGLANG = "ziglang==0.17.1"


def get_requires_for_build_wheel(config_settings: Mapping[str, object] | None = None) -> list[str]:
    """The hook of PEP 517."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Mapping[str, object] | None = None) -> list[str]:
    """The hook of PEP 660."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]


def machine_has_compiler() -> bool:
    """Whether the compiler that setuptools would take turns C++20 into an object file."""
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    command = [*shlex.split(compiler), "-std=c++20", "-x", "c++", "-c", "-o", os.devnull, "-"]
    try:
        done = subprocess.run(
            command, input="#include <span>\n", text=True, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _compiler() -> list[str]:
    return [] if machine_has_compiler() else [ZIGLANG]


if __name__ == "__main__":
    print("\n".join(_compiler()))
