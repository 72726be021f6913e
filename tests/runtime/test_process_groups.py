"""Which default process groups transfers can be made under, and what NCCL may take for each channel."""

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.runtime import process_groups
from megatron_dynapipe.runtime.process_groups import check_unbound, group_of_each

NEWEST = hasattr(dist, "ProcessGroupNCCLLazy")


def test_groups_bound_to_a_device_are_refused_where_their_pairs_share_a_stream(monkeypatch):
    monkeypatch.setattr(process_groups, "PAIRWISE_NCCL", "nccl-lazy")
    check_unbound("nccl", torch.device("cuda", 1))
    monkeypatch.setattr(process_groups, "PAIRWISE_NCCL", "nccl")
    with pytest.raises(ConfigError, match="not bound to a device, got one bound to cuda:1") as refused:
        check_unbound("nccl", torch.device("cuda", 1))
    assert "init_process_group without device_id" in refused.value.hint
    check_unbound("nccl", None)
    check_unbound("gloo", torch.device("cuda", 1))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_channels_take_few_of_a_devices_blocks(backend, monkeypatch):
    """Faked is torch's call that makes a group; its options are torch's own."""
    made = []

    def new_group(ranks, **options):
        made.append(options)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    group_of_each([[0, 1]], backend=backend, timeout_s=7, for_transfers=True)
    group_of_each([[0, 1]], backend=backend, timeout_s=7)
    few, other = (options["pg_options"] for options in made)
    assert made[0]["backend"] == ("nccl-lazy" if NEWEST and backend == "nccl" else backend)
    assert made[1]["backend"] == backend
    assert other is None, "collectives take what NCCL chooses"
    if backend == "gloo":
        assert few is None
    else:
        assert few.config.max_ctas == 8 and few._timeout == made[0]["timeout"]
