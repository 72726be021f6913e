"""What a run relies on of Megatron is checked at its start, whatever version it says."""

import contextlib
import importlib
import io
import sys
import types

import pytest

from megatron_dynapipe.core.errors import UnsupportedMegatronError
from megatron_dynapipe.megatron.entry import bootstrap
from megatron_dynapipe.megatron.hooks import compatibility
from tests.helpers.processes import in_ranks

SCHEDULES = compatibility.SCHEDULES


@in_ranks(1)
def test_the_installed_megatron_passes_without_a_word():
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compatibility.check()
    assert not said.getvalue()


@in_ranks(1)
def test_what_is_missing_is_named():
    del importlib.import_module(compatibility.TRAINING).train_step
    message = "lacks what planned runs rely on: no train_step in megatron.training.training\nhint: pip install"
    with pytest.raises(UnsupportedMegatronError, match=message):
        compatibility.check()


@in_ranks(1)
def test_names_parameters_and_calls_that_are_missing_are_said():
    training = compatibility.TRAINING
    for row, said in (
        ((SCHEDULES, "get_forward_backward_func", ("pp_size",)), ""),
        (
            (SCHEDULES, "get_forward_backward_func", ("pp_size", "planets")),
            f"get_forward_backward_func of {SCHEDULES} takes no planets",
        ),
        ((SCHEDULES, "no_such_function", ()), f"no no_such_function in {SCHEDULES}"),
        (("megatron.core.no_such_module", "train", ()), "no train in megatron.core.no_such_module"),
    ):
        assert compatibility.missing_name(row) == said
    # A wrapped function is looked at in its file: scripts of these tests wrap `training_log` to see losses.
    importlib.import_module(training).training_log = lambda *arguments: None
    for call, said in (
        ((training, "train", "train_step"), []),
        ((training, "train", "no_such_function"), [f"train() of {training} calls no no_such_function"]),
        ((training, "no_such_function", "train_step"), [f"no_such_function() of {training} calls no train_step"]),
    ):
        assert compatibility.missing_calls([call]) == said
    assert compatibility.missing_calls(compatibility.CALLS) == []


@in_ranks(1)
def test_an_unpatched_megatron_lacks_every_call_of_the_patches():
    with pytest.raises(UnsupportedMegatronError, match="--check` says what each file is") as refused:
        compatibility.check_patches()
    assert str(refused.value).count("calls no ") == len(compatibility.PATCHES)


@pytest.mark.parametrize(
    ("lacking", "raised"),
    [("megatron.core.parallel_state", UnsupportedMegatronError), ("torch.no_such_module", ImportError)],
)
def test_a_module_that_an_old_megatron_lacks_is_one_error(lacking, raised, monkeypatch):
    """Others are defects of ours, or of the environment, and pass."""
    name = "megatron_dynapipe.megatron.hooks"
    package = types.ModuleType(name)

    def lack(wanted: str) -> None:
        raise ImportError(f"No module named {lacking!r}", name=lacking)

    package.__getattr__ = lack
    monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(raised, match=lacking):
        bootstrap.check_megatron()
