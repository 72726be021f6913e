"""Settings of the whole suite."""

import atexit
import gc
import os
from collections import Counter
from pathlib import Path

# Two ranks on two cores: more threads than cores make every multi-process test slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.helpers.examples import AT_NIGHT, EVERY_DAY

gc.disable()  # until all tests are collected: what is imported stays

# The same examples in every run that loads the same modules, on however slow a machine.
settings.register_profile("every day", max_examples=EVERY_DAY, derandomize=True, deadline=None, database=None)
settings.register_profile("night", max_examples=AT_NIGHT, deadline=None, database=None)
settings.load_profile("every day")

LONGEST = (
    "rehearsal/test_training.py",
    "megatron/execution/test_exactness.py",
    "tools/certify/test_certify.py",
    "tools/conversion/test_training.py",
    "patches/test_training.py",
    "megatron/entry/test_bad_input.py",
    "modules/test_planning.py",
    "tools/tuning/test_tuning.py",
    "cli/test_tune.py",
    *(f"megatron/bridge/test_{name}.py" for name in ("certify", "training", "families", "experts")),
)
"""Files that take longer than others of as many tests: `make test` prints the longest tests, by which this is kept."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of random tokens, which no test changes."""
    from tests.helpers.random_dataset import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "random")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, then those of most tests; skip tests marked `gpu` where there is no CUDA device."""
    tests = Counter(item.path for item in items)
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), -tests[item.path]))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Let collections during tests leave out what was imported, which takes longer than most tests."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # as `processes.importing`
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: compressed ones may hold the time, and two workers must collect the same names."""
    return argname if isinstance(val, bytes) else None
