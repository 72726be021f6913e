"""Computed costs against what others measured: a change of constants shows here."""

from benchmarks.cost_accuracy.published import ROWS, median_error, order, predict


def test_published_iterations_are_predicted() -> None:
    """Of 27 rows, and of the pairs of layouts of one model."""
    predictions = [(row, predict(row)) for row in ROWS]
    assert median_error(predictions) <= 0.15
    right, pairs = order(predictions)
    assert pairs == 8 and right / pairs >= 0.8
