"""Hints are made for the script that shows them: arguments of `planned` in place of flags."""

import ast
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.megatron.bridge import hints


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (
            "raise the maximum length, or use --dynapipe-long-samples truncate (or skip)",
            'in planned(config, …): raise the maximum length, or use long_samples="truncate" (or skip)',
        ),
        ("go on with --dynapipe-cost-model costs.json", 'in planned(config, …): go on with costs="costs.json"'),
        ("--dynapipe-timeout-s allows more", "in planned(config, …): timeout_s=… allows more"),
        ("copy them again", "copy them again"),
    ],
)
def test_flags_become_arguments(hint: str, said: str) -> None:
    with pytest.raises(DataError) as caught, hints.in_python():
        raise DataError("33 samples are too long", hint=hint)
    assert caught.value.hint == said
    assert str(caught.value).endswith(said)


def test_every_argument_is_one() -> None:
    """As the source says, which cannot be imported without Megatron-Bridge."""
    source = Path(hints.__file__).with_name("entry.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    (planned,) = [function.args for function in functions if function.name == "planned"]
    assert set(hints.ARGUMENTS.values()) <= {argument.arg for argument in (*planned.args, *planned.kwonlyargs)}
