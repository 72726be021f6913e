"""What tests of this room train on."""

from pathlib import Path

import pytest

from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset of random tokens, which no test changes."""
    return make_dataset(tmp_path_factory.mktemp("data") / "random")
