"""What planned runs refuse of Megatron's configuration: names that it has, and that nobody asks for by default."""

import argparse
from typing import Any

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.flags import fork
from megatron_dynapipe.megatron.flags.refusals import (
    ENTRY_SCRIPTS,
    EVERYWHERE,
    EXPERTS,
    LOCAL,
    SCRIPTS,
    T5,
    Refusal,
    check,
    first_asked,
)
from tests.helpers.processes import run_ranks

NEWER = {"sequence_packing_scheduler", "use_varlen_dataset", "varlen_sbhd_validation", "dynamic_context_parallel"}
NEWER |= {"varlen_mock_dataset_config_json"}
NEWER |= {"fp8_dot_product_attention", "fp8_multi_head_attention"}
"""Arguments of Megatron's branches main and dev that 0.19 does not have."""
TABLES = {
    "everywhere": EVERYWHERE,
    "experts": EXPERTS,
    "scripts": SCRIPTS,
    "entry scripts": ENTRY_SCRIPTS,
    "local": LOCAL,
    "T5": T5,
}
NAMES = {name: (table, row) for table, rows in TABLES.items() for row in rows for name in row.names.split()}


def defaults_of_megatron(rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Every argument of the Megatron that this process imports, by destination, with its default as text of a value."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    names = {name for action in parser._actions for name in action.option_strings}
    assert not names & set(fork.NOT_TAKEN), "flags of the fork that Megatron has, too"
    return {name: value for name, value in vars(parser.parse_args([])).items() if name in NAMES}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return run_ranks(defaults_of_megatron, 1)[0]


def test_megatron_has_every_name_that_is_refused(defaults: dict[str, Any]) -> None:
    """A name that it has no longer, or spells otherwise, would refuse nothing."""
    assert NAMES.keys() - defaults.keys() == NEWER


def test_nothing_is_asked_for_by_default(defaults: dict[str, Any]) -> None:
    for rows in TABLES.values():
        assert first_asked(rows, defaults.get) is None


def test_a_name_stands_once() -> None:
    names = [name for rows in TABLES.values() for row in rows for name in row.names.split()]
    assert len(names) == len(set(names)) > 70


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_that_is_asked_for_is_refused_with_its_flag_and_its_reason(name: str) -> None:
    table, row = NAMES[name]
    value = 2 if row.unasked == 1 else "asked"
    args = argparse.Namespace(
        use_dynapipe=table in ("everywhere", "experts", "scripts"),
        num_experts=4 if table == "experts" else None,
        transformer_impl="local" if table == "local" else "transformer_engine",
        **({row.only_with: "asked"} if row.only_with else {}),
        **{name: value},
    )
    family = ModelFamily.T5 if table == "T5" else ModelFamily.GPT
    with pytest.raises(ConfigError) as caught:
        check(args, family, [])
    flag = f"--{name.replace('_', '-')}"
    assert caught.value.message.startswith(f"{flag} cannot be used with DynaPipe")
    assert caught.value.message.endswith(row.why) and caught.value.hint == f"remove {flag}"


def test_a_flag_is_named_as_megatron_names_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-graphs", dest="cuda_graph_impl", action="store_const", const="none")
    parser.add_argument("--graphs", dest="cuda_graph_impl", action="store_const", const="local")
    plain = argparse.Namespace(use_dynapipe=True, transformer_impl="local", num_experts=None)
    args = parser.parse_args(["--graphs"], plain)
    with pytest.raises(ConfigError, match="--graphs cannot be used"):
        check(args, ModelFamily.GPT, parser._actions[1:])


@pytest.mark.parametrize(
    ("value", "is_asked"),
    [("aux_loss", False), (["none", "seq_aux_loss"], False), ("sinkhorn", True), (["aux_loss", "sinkhorn"], True)],
)
def test_a_word_that_is_taken_is_not_refused(value: object, is_asked: bool) -> None:
    refused = first_asked(EXPERTS, {"moe_router_load_balancing_type": value}.get)
    assert (refused is not None) == is_asked


@pytest.mark.parametrize(
    ("value", "is_asked"), [(None, False), (False, False), (1, False), ([], False), (2, True), (True, False)]
)
def test_an_unasked_value_is_not_refused(value: object, is_asked: bool) -> None:
    refusal = Refusal("context_parallel_size", "why", 1)
    assert [*refusal.asked({"context_parallel_size": value}.get)] == ["context_parallel_size"] * is_asked


def test_a_patched_checkout_builds_its_own_model() -> None:
    args = argparse.Namespace(use_dynapipe=True, transformer_impl="local", num_experts=None, spec="mine")
    check(args, ModelFamily.GPT, [])


@pytest.mark.parametrize("name", ["mtp_num_layers", "use_megatron_fsdp", "context_parallel_size"])
def test_compositions_that_megatron_7452_reports_to_train_something_else_are_refused_everywhere(name: str) -> None:
    assert NAMES[name][0] == "everywhere"
