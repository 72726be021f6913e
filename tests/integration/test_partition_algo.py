"""Training from micro-batches that were made in another way."""

from tests.integration import entry


def test_a_run_of_token_based_micro_batches(tmp_path):
    data = entry.make_dataset(tmp_path / "data")
    flags = "--dynapipe-partition-algo token_based --dynapipe-token-based-partition-mbs 128 --train-iters 2"
    runs = entry.train("t5", data, flags, ranks=1, report=tmp_path / "report")
    assert runs[-1]["losses"].keys() == {"1", "2"}
