"""Gives torch its rehearsed devices as soon as a process has imported it; see `tests.helpers.rehearsal`."""

import importlib.abc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[4]


class _Rehearsing(importlib.abc.MetaPathFinder):
    """Finds torch as always, and goes on after it was imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if str(ROOT) not in sys.path:
                    sys.path.append(str(ROOT))
                from tests.helpers.rehearsal import devices

                devices.install(int(os.environ["REHEARSED_DEVICES"]))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("REHEARSED_DEVICES"):
    sys.meta_path.insert(0, _Rehearsing())
