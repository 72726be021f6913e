"""The planning flags of training and of commands: the same values, old spellings, and what is refused."""

import argparse

import pytest

from megatron_dynapipe.core import orders as schedules
from megatron_dynapipe.core.orders import SCHEDULES
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.megatron.flags.planning_flags import TRAINING, add_planning_flags

TAKEN = [
    # a flag, its old spelling among commands' flags, a value as text, its attribute and value
    ("device-memory-limit", "device-memory-mb", "36000", "device_memory_limit", 36000.0),
    ("limit-rc-type", "recompute", "full, none", "limit_rc_type", (Recompute.NONE, Recompute.FULL)),
    ("layout", "layout", "packed", "layout", "packed"),
    ("slices", "slices", "64", "slices", 64),
    ("slices", "slices", "off", "slices", "off"),
    ("context-teams", "context-teams", "4", "context_teams", 4),
    ("split-backward", "split-backward", "on", "split_backward", "on"),
    *(("schedule", "schedule", name, "schedule", name) for name in SCHEDULES),
    ("layers-per-stage", "layer-split", "3", "layers_per_stage", (3,)),
    ("layers-per-stage", "layer-split", "2.5,1.5", "layers_per_stage", (2.5, 1.5)),
    ("layers-per-stage", "layer-split", "0,3,0", "layers_per_stage", (0, 3, 0)),
    ("layers-per-stage", "layer-split", "auto", "layers_per_stage", "auto"),
    ("scatter-gather", "scatter-gather", "on", "scatter_gather", "on"),
    ("expert-imbalance", "expert-imbalance", "2", "expert_imbalance", 2.0),
]
REFUSED = [
    *(("layers-per-stage", text) for text in ("", "3,x", "3,0,1", "0", "0,0", "3;1", "automatic")),
    *(("slices", text) for text in ("7", "on", "-8", "8.5")),
    *(("context-teams", text) for text in ("0", "-2", "2.5", "auto")),
    *(("limit-rc-type", text) for text in ("", "some", "none,none", "full;none")),
    *(("device-memory-limit", text) for text in ("0", "-1", "nan", "inf", "x")),
    *(("expert-imbalance", text) for text in ("0", "nan")),
    *((name, "maybe") for name in ("layout", "split-backward", "scatter-gather", "schedule")),
]


def parsed(prefix: str, *words: str, **defaults: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_planning_flags(parser, prefix, **defaults)
    return parser.parse_args(words)


@pytest.mark.parametrize(("name", "spelling", "text", "attribute", "value"), TAKEN)
def test_training_and_commands_read_a_flag_alike(name, spelling, text, attribute, value):
    assert getattr(parsed(TRAINING, f"{TRAINING}{name}={text}"), f"dynapipe_{attribute}") == value
    for flag in (name, spelling):
        assert getattr(parsed("--", f"--{flag}={text}"), attribute) == value


@pytest.mark.parametrize("prefix", [TRAINING, "--"])
@pytest.mark.parametrize(("name", "text"), REFUSED)
def test_a_value_that_is_none_is_refused_by_its_flag(name, text, prefix):
    with pytest.raises(argparse.ArgumentError, match=rf"^argument {prefix}{name}[^:]*: (expected|invalid choice)"):
        parsed(prefix, f"{prefix}{name}={text}")


def test_help_names_the_schedules_that_there_are(monkeypatch):
    monkeypatch.setattr(schedules, "SCHEDULES", {**SCHEDULES, "two-in-flight": None})
    parser = argparse.ArgumentParser()
    add_planning_flags(parser, TRAINING)
    assert "one of adaptive, 1f1b, gpipe, two-in-flight:" in " ".join(parser.format_help().split())


def test_commands_have_the_published_default_of_transfers():
    assert parsed("--", scatter_gather="off").scatter_gather == "off"
    assert parsed(TRAINING).dynapipe_scatter_gather == "auto"
