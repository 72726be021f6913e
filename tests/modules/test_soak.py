"""Two hundred iterations of changing shapes leave a rank's memory where it was."""

import gc

import psutil
import pytest
import torch

from tests.helpers.processes import in_ranks
from tests.modules.test_pipeline import toy_batch, toy_pipeline


@pytest.mark.slow
@in_ranks(2, deadline_s=280)
def test_memory_is_flat():
    """Resident bytes after a quarter of the iterations, and at the end."""
    draw, (_, pipeline), found = torch.Generator().manual_seed(0), toy_pipeline(), []
    for iteration in range(200):
        size, length = torch.randint(2, 60, (2,), generator=draw).tolist()
        pipeline.step(toy_batch(size, length, iteration))
        if iteration in (49, 199):
            gc.collect()
            found.append(psutil.Process().memory_info().rss)
    early, late = found
    assert late < 1.1 * early
