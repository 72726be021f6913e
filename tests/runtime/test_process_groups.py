"""Which default process groups transfers can be made under."""

import pytest
import torch

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.process_groups import check_unbound


def test_groups_bound_to_a_device_are_refused():
    with pytest.raises(ConfigError, match="not bound to a device, got one bound to cuda:1") as refused:
        check_unbound("nccl", torch.device("cuda", 1))
    assert "init_process_group without device_id" in refused.value.hint
    check_unbound("nccl", None)
    check_unbound("gloo", torch.device("cuda", 1))
