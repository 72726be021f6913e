"""Builds the native planner core, megatron_dynapipe.core._native, from csrc/ with nanobind.

The machine's own C++ compiler builds it; where none works, the one that the package `ziglang` brings, which is then a
build requirement (scripts/build_backend.py). A build that fails stops the installation and says what is missing.
Everything else is in pyproject.toml.
"""

import importlib.util
import os
import shlex
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
from build_backend import ZIGLANG, machine_has_compiler  # noqa: E402

CORE = "megatron_dynapipe.core._native"
# No -ffast-math, no -march=native: a plan is the same on every machine.
COMPILE_ARGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG", "-g0"]


def use_zig() -> None:
    """Let setuptools compile and link with zig's clang, by the variables it reads."""
    compiler = f"{shlex.quote(sys.executable)} -m ziglang c++ -fno-sanitize=undefined"
    os.environ |= {
        "CC": compiler,
        "CXX": compiler,
        "LDSHARED": f"{compiler} -shared",
        "LDCXXSHARED": f"{compiler} -shared",
    }


class BuildCore(build_ext):
    """Compiles the native core, or stops and says why."""

    def run(self) -> None:
        if not machine_has_compiler():
            if importlib.util.find_spec("ziglang") is None:
                raise SystemExit(failure("no C++20 compiler works here"))
            use_zig()
        self.is_into_source = bool(self.inplace)  # which setuptools takes back while it compiles
        super().run()

    def build_extension(self, ext: Extension) -> None:
        # If this build fails, no library of older sources must stay, neither in build/ nor, where it would go there,
        # beside the Python. A wheel that is built in a checkout leaves the checkout's own library alone.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        if self.is_into_source:
            (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        own_sources = ext.sources
        try:
            import nanobind

            package = Path(nanobind.include_dir()).parent
            ext.include_dirs += [str(package / "include"), str(package / "ext" / "robin_map" / "include")]
            ext.sources = [str(package / "src" / "nb_combined.cpp"), *own_sources]
            compile_side_by_side(self.compiler)
            super().build_extension(ext)
        except Exception as error:
            headers = Path(sysconfig.get_path("include"), "Python.h")
            missing = "" if headers.exists() else f" ({headers} is missing)"
            raise SystemExit(failure(f"{error}{missing}")) from error
        finally:
            ext.sources = own_sources  # a source distribution lists these, and must not list nanobind's


def compile_side_by_side(compiler: Any) -> None:
    """Let a compiler of setuptools' compile several files at a time: it takes one after another, on one core.

    It says how far it is, which `pip install -v` shows.
    """
    compile_one = compiler.compile

    def compile_all(files: list[str], **settings: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects: list[str] = []
            for number, compiled in enumerate(pool.map(lambda file: compile_one([file], **settings), files), 1):
                print(f"compiled {number} of {len(files)} files", flush=True)
                objects += compiled
            return objects

    compiler.compile = compile_all


def failure(reason: str) -> str:
    return (
        f"error: the planner's native core could not be built: {reason}\n"
        "hint: install a C++20 compiler and the headers of this Python (on Debian: apt install g++ python3-dev), or"
        f" pip install {ZIGLANG}, which brings a compiler; then install this package again"
    )


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


setup(
    ext_modules=[
        Extension(
            CORE,
            sources("csrc/*.cpp", "csrc/*/*.cpp"),
            depends=sources("csrc/*.h", "csrc/*/*.h"),
            include_dirs=["csrc"],
            language="c++",
            extra_compile_args=COMPILE_ARGS,
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
