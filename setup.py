"""Builds the optional native planner core; everything else is in pyproject.toml.

`megatron_dynapipe.planning._native` is compiled from csrc/*.cpp with nanobind. It is an accelerator: without a C++
compiler the install succeeds with a notice, and the pure Python twin of every native function is used.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NATIVE = "megatron_dynapipe.planning._native"
# No -ffast-math, no -march=native: a plan is the same on every machine.
COMPILE_ARGS = ["-std=c++17", "-O2", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG", "-g0"]


def native_extensions() -> list[Extension]:
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.cpp"))
    headers = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/*.h*"))
    if not sources:
        return []
    return [Extension(NATIVE, sources, depends=headers, language="c++", extra_compile_args=COMPILE_ARGS, optional=True)]


class OptionalBuildExt(build_ext):
    """Compiles the native core with nanobind, or says that the pure Python twin will be used."""

    def build_extension(self, ext: Extension) -> None:
        # If this build fails, no library of older sources must stay, neither in build/ nor beside the Python.
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        (ROOT / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        own_sources = ext.sources
        try:
            import nanobind

            package = Path(nanobind.include_dir()).parent
            ext.include_dirs += [str(package / "include"), str(package / "ext" / "robin_map" / "include")]
            ext.sources = [*own_sources, str(package / "src" / "nb_combined.cpp")]
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001 - whatever is missing, the install goes on
            print(f"notice: {ext.name} was not built ({error}); the pure Python planner is used", file=sys.stderr)
        finally:
            ext.sources = own_sources  # a source distribution lists these, and must not list nanobind's


setup(ext_modules=native_extensions(), cmdclass={"build_ext": OptionalBuildExt})
