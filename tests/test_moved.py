"""Names that modules had are importable for a release."""

from importlib import import_module

import pytest

from megatron_dynapipe.moved import MOVED, PACKAGE, PACKAGES
from tests.helpers.commands import run_python


@pytest.mark.parametrize("old", sorted(MOVED.keys() - PACKAGES))
def test_a_moved_module_is_the_one_under_its_new_name(old: str) -> None:
    new = MOVED[old]
    with pytest.warns(DeprecationWarning, match=f"{PACKAGE}.{new}; the old name goes with the next release"):
        module = import_module(f"{PACKAGE}.{old}")
    assert module is import_module(f"{PACKAGE}.{new}")


def test_names_are_imported_from_moved_modules() -> None:
    run_python(
        "-c",
        "from megatron_dynapipe.planning.planner import Planner\n"
        "from megatron_dynapipe.plan.iteration import IterationPlan\n"
        "from megatron_dynapipe.plan import codec\n"
        "assert Planner.__module__ == 'megatron_dynapipe.core.planner'\n"
        "assert IterationPlan.__module__ == 'megatron_dynapipe.core.plan' and codec.encode",
    )
