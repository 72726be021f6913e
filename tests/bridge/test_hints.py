"""Hints are made for the script that shows them: arguments of `planned` in place of flags."""

import inspect

import pytest

from megatron_dynapipe.bridge import hints
from megatron_dynapipe.core.errors import DataError
from tests.helpers.bridge_here import in_bridge


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


@in_bridge
def test_every_argument_is_one() -> None:
    from megatron_dynapipe.bridge import planned

    assert set(hints.ARGUMENTS.values()) <= set(inspect.signature(planned).parameters)
