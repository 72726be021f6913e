"""Finding the folder of shared data and tools that some checkouts have beside them."""

from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def shared_folder() -> Path | None:
    """The folder `shared` beside the checkout; None if there is none."""
    folder = CHECKOUT.parent / "shared"
    return folder if folder.is_dir() else None


def shared_data(*parts: str) -> Path:
    """A file or folder of the shared data; skips the calling test where it is absent."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("no shared folder beside the checkout")
    path = folder.joinpath("data", *parts)
    if not path.exists():
        pytest.skip(f"no {'/'.join(parts)} in the shared data")
    return path
