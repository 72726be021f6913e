"""The journal of measurements: goes on after an interruption, refuses what is not its own."""

from pathlib import Path

import pytest

from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.integration.profiling.journal import Journal, Measurement
from megatron_dynapipe.units import Recompute

ONE = Measurement(part="encoder", recompute=Recompute.NONE, point=(1, 8), forward_ns=5, backward_ns=9, stored_bytes=3)
TWO = Measurement(part="decoder", recompute=Recompute.FULL, point=(1, 8, 16), fits=False)


def test_measurements_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.json.partial"
    journal = Journal(path, "a model")
    assert journal.found == []
    journal.add(ONE)
    journal.add(TWO)
    assert Journal(path, "a model").found == [ONE, TWO]
    journal.remove()
    assert not path.exists()


def test_half_a_line_of_an_interrupted_write_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "p"
    Journal(path, "a model").add(ONE)
    with path.open("ab") as file:
        file.write(b'{"part": "enc')
    journal = Journal(path, "a model")
    assert journal.found == [ONE]
    journal.add(TWO)
    assert Journal(path, "a model").found == [ONE, TWO]


def test_measurements_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    Journal(path, "a model")
    with pytest.raises(CostModelError, match=r"of another model, device or version:\n  a model\nnot of\n  b\nhint"):
        Journal(path, "b")


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(b'{"settings": "a model"}\n{"part": 3}\n')
    with pytest.raises(CostModelError, match=r"is not a journal of measurements: .*part"):
        Journal(path, "a model")


def test_ranks_without_a_file_keep_nothing(tmp_path: Path) -> None:
    journal = Journal(None, "a model")
    journal.add(ONE)
    journal.remove()
    assert journal.found == [] and list(tmp_path.iterdir()) == []
