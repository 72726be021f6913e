"""Sizes as people read them."""

import pytest

from megatron_dynapipe.core.units import in_mb


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((13_400_000, 12_000_000), ["13 MB", "12 MB"]),
        ((13_400_000, 13_000_000), ["13.4 MB", "13.0 MB"]),
        ((13_000_001, 13_000_000), ["13.000001 MB", "13.000000 MB"]),
        ((5, 5), ["0 MB", "0 MB"]),
        ((0, 1), ["0.000000 MB", "0.000001 MB"]),
    ],
)
def test_different_sizes_read_differently(sizes: tuple[int, ...], texts: list[str]) -> None:
    assert in_mb(*sizes) == texts
