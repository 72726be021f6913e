"""Memory of weights, gradients and optimizer states, counted from modules."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.processes import in_ranks

WEIGHTS, OF_EXPERTS, FROZEN, BUFFER = 1000, 600, 500, 7
CASES = [
    # type, optimizer, gradients in fp32, replicas that share states, products in eight bits, bytes
    (torch.float32, "adam", True, 1, False, 2100 * 4 + 1600 * (4 + 8)),
    (torch.bfloat16, "adam", True, 1, False, 2100 * 2 + 1600 * (4 + 12)),
    (torch.bfloat16, "sgd", False, 1, False, 2100 * 2 + 1600 * (2 + 8)),
    (torch.bfloat16, "adam", True, 8, True, 2100 * (2 + 2) + 1600 * 4 + 1000 * 12 // 8 + 600 * 12 // 4),
    (torch.float32, None, True, 1, False, 2100 * 4),
]


@in_ranks(1)
def test_states_are_counted_from_the_modules():
    from megatron.core import parallel_state

    from megatron_dynapipe.megatron.models.config import model_state_bytes
    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel()
    control = ControlGroup(timeout_s=60)
    for dtype, optimizer, in_fp32, shards, eight_bits, expected in CASES:
        module = nn.Module()
        module.words = nn.Parameter(torch.zeros(WEIGHTS, dtype=dtype))
        module.head = module.words  # shared, and counted once
        module.experts = nn.Parameter(torch.zeros(OF_EXPERTS, dtype=dtype))
        module.experts.allreduce = False
        module.frozen = nn.Parameter(torch.zeros(FROZEN, dtype=dtype), requires_grad=False)
        module.register_buffer("positions", torch.zeros(BUFFER, dtype=torch.int64))
        config = SimpleNamespace(
            params_dtype=dtype,
            fp8="e4m3" if eight_bits else None,
            tensor_model_parallel_size=1,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=None,
        )
        given = {"optimizer": optimizer, "gradients_in_fp32": in_fp32, "shards": shards}
        assert model_state_bytes([module], config, control, **given) == (expected + 8 * BUFFER,), given
