import itertools

import pytest
import torch.distributed as dist

from megatron_dynapipe.core.errors import ConfigError
from tests.helpers.processes import in_ranks


@in_ranks(1)
def test_one_stage_is_megatrons_own_t5():
    from tests.helpers.layouts.model import start
    from tests.megatron.models import t5_ranks as t5

    start(t5.ENCODER, t5.t5_layout(1, 1, 1))
    kinds = ("learned_absolute", "rope", "relative"), (True, False), ("megatron", "sdpa")
    for positions, tied, attention in itertools.product(*kinds):
        if (positions, attention) != ("relative", "megatron"):  # which has none
            t5.check_against_megatrons(positions, tied, attention)
    stage = t5.T5Stage(t5.config(t5.ENCODER), args=t5.t5_args(), layout=t5.t5_layout(2, 3, 1), stage=0)
    stage._takes_rows = True  # as with Transformer Engine's attention
    message = "expected rows for the layers of Transformer Engine, got masks\nhint: give T5StageInputs its"
    with pytest.raises(ConfigError, match=message):
        stage(t5.batch_of(t5.SHAPES[0], 0))


@in_ranks(2)
def test_process_groups_made_for_another_model_are_refused(rank):
    """Those that Megatron makes by default."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.megatron.models import t5_ranks as t5

    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    config = t5.config(t5.Layout(family="t5", stages=2))
    message = r"groups of one rank, got one of 2: Megatron would reduce[\s\S]*give pretrain t5_stage.embedding_ranks"
    with pytest.raises(ConfigError, match=message):
        t5.T5Stage(config, args=t5.t5_args(), layout=t5.t5_layout(2, 2, 2), stage=rank)
