"""Modules that have moved: their names of before are importable for one release.

    from megatron_dynapipe.planning.planner import Planner     # still works, with a DeprecationWarning

The module under an old name is the one under the new name, not a copy of it.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "megatron_dynapipe"
MOVED = {
    "cost": "costing",
    "cost.adaptive": "costing.adaptive",
    "cost.analytic": "costing.analytic",
    "cost.check": "costing.check",
    "cost.devices": "costing.devices",
    "cost.division": "costing.division",
    "cost.experts": "costing.experts",
    "cost.file": "costing.file",
    "cost.format": "costing.format",
    "cost.hugging_face": "costing.hugging_face",
    "cost.layout": "core.model",
    "cost.links": "costing.links",
    "cost.model": "costing.model",
    "cost.modules": "costing.modules",
    "cost.network": "core.network",
    "cost.pattern": "costing.pattern",
    "cost.pieces": "costing.pieces",
    "cost.shape": "costing.shape",
    "cost.splits": "costing.splits",
    "cost.stage_modules": "costing.stage_modules",
    "cost.state": "costing.state",
    "cost.surface": "costing.surface",
    "cost.tables": "core.costs",
    "cost.tabulate": "costing.tabulate",
    "cost.work": "costing.work",
    "errors": "core.errors",
    "plan": "core",
    "plan.codec": "store.codec",
    "plan.entry": "store.entry",
    "plan.in_step": "ways.step_rule",
    "plan.instructions": "core.instructions",
    "plan.iteration": "core.plan",
    "plan.memory": "core.memory",
    "plan.packing": "core.plan",
    "plan.pieces": "ways.chains",
    "plan.text": "core.instructions",
    "plan.timeline": "core.plan",
    "plan.transfer_rules": "core.network",
    "plan.verify": "core.verify",
    "plan.verify_buffers": "core.verify_buffers",
    "plan.verify_samples": "core.verify",
    "plan.verify_transfers": "core.verify_transfers",
    "planning": "core",
    "planning.assembly": "core.planner",
    "planning.balance": "core.scheduling",
    "planning.boundary": "core.model",
    "planning.candidates": "core.ways",
    "planning.costing": "choosing.planners",
    "planning.evenest": "choosing.evenest",
    "planning.layer_split": "choosing.layer_split",
    "planning.least_costs": "choosing.least_costs",
    "planning.limits": "choosing.limits",
    "planning.lost_time": "choosing.lost_time",
    "planning.lowering": "core.lowering",
    "planning.native": "core.native",
    "planning.partition": "core.partition",
    "planning.planner": "core.planner",
    "planning.problem": "core.problem",
    "planning.rescheduling": "choosing.rescheduling",
    "planning.samples": "core.batch",
    "planning.schedules": "core.orders",
    "planning.schedules.list_scheduling": "core.orders",
    "planning.schedules.one_f_one_b": "core.orders",
    "planning.schedules.trial": "choosing.trial",
    "planning.scheduling": "core.scheduling",
    "planning.search": "core.search",
    "planning.settings": "core.settings",
    "planning.simulate": "core.simulate",
    "planning.stopwatch": "core.planner",
    "planning.ways": "ways",
    "planning.ways.in_step": "ways.in_step",
    "planning.ways.pieces": "ways.pieces",
    "planning.ways.rules": "ways.rules",
    "planning.ways.theirs": "ways.theirs",
    "planning.ways.whole": "ways.whole",
    "runtime.executor": "core.executor",
    "runtime.passes": "core.passes",
    "runtime.step": "core.step",
    "runtime.trace": "core.executor",
    "units": "core.units",
}
"""Old name → new name, inside the package; to be removed with the release after 0.1."""
PACKAGES = {old for old in MOVED if any(other.startswith(f"{old}.") for other in MOVED)}
"""Those that held other modules, which have not all gone to one place."""


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under the names that they had."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module that has moved, None for others."""
        package, _, old = name.partition(".")
        return ModuleSpec(name, self, is_package=old in PACKAGES) if package == PACKAGE and old in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of an empty one; a package finds its old modules and names."""
        name = module.__name__
        old = name.removeprefix(f"{PACKAGE}.")
        new = f"{PACKAGE}.{MOVED[old]}"
        if old in PACKAGES:
            module.__getattr__ = lambda wanted: getattr(import_module(new), wanted)  # type: ignore[method-assign]
            return
        warnings.warn(f"{name} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(new)


def install() -> None:
    """Let imports find moved modules, before Python looks for files."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
