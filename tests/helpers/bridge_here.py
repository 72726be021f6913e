"""Tests that need Megatron-Bridge and rehearsed devices: those of `make test-bridge`."""

import importlib.util
from collections.abc import Callable

import pytest

from tests.helpers.rehearsal import build

HAS_BRIDGE = importlib.util.find_spec("megatron.bridge") is not None
MARKS = [
    pytest.mark.bridge,
    pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++"),
    pytest.mark.skipif(not HAS_BRIDGE, reason="there is no Megatron-Bridge here"),
    pytest.mark.timeout(3600),  # of the first test of a file, which waits for all runs
]


def in_bridge[T: Callable[..., None]](test: T) -> T:
    """One test of `make test-bridge`."""
    for mark in MARKS:
        test = mark(test)
    return test
