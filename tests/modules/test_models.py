"""Models that nobody here wrote, in pieces: losses and gradients of one process, whatever the pieces."""

import pytest

from tests.helpers.processes import run_ranks
from tests.modules.models import CASES, build
from tests.modules.training import SIZES, train

TOLERANCE = 1e-5
EVERYDAY = {("vision", 2, 1), ("adapters", 2, 1)}
"""With three steps of the five that the others train."""


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        pytest.param(name, stages, replicas, marks=() if (name, stages, replicas) in EVERYDAY else pytest.mark.slow)
        for name in CASES
        for stages in (2, 4)
        for replicas in (1, 2)
    ],
)
def test_losses_and_gradients_are_those_of_one_process(name, stages, replicas):
    sizes = SIZES[:3] if (name, stages, replicas) in EVERYDAY else SIZES
    arguments = {"name": name, "replicas": replicas, "sizes": sizes}
    ranks = run_ranks(train, stages * replicas, arguments, deadline_s=240)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(rank["expected"], abs=TOLERANCE)
        assert rank["gradients"] < TOLERANCE and rank["weights"] < TOLERANCE
    names = {name for rank in ranks for name in rank["names"]}
    whole = dict(build(name).named_parameters(remove_duplicate=False))
    used = {key for key in whole if key in names or not any(whole[key] is whole[other] for other in names)}
    assert used == names, "names are those of the whole model, and none is missing"
