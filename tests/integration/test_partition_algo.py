"""Training from micro-batches that were made in another way."""

from tests.helpers import entry_scripts
from tests.helpers.random_dataset import make_dataset


def test_a_run_of_token_based_micro_batches(tmp_path):
    data = make_dataset(tmp_path / "data")
    flags = "--dynapipe-partition-algo token_based --dynapipe-token-based-partition-mbs 128 --train-iters 2"
    runs = entry_scripts.train("t5", data, flags, ranks=1, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
