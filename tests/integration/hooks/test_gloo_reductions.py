"""Reductions over gloo one by one give what the coalesced ones do."""

from tests.helpers.processes import run_ranks


def reduce_both_ways(rank: int, world_size: int) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_dynapipe.integration.hooks import gloo_reductions

    dist.init_process_group("gloo", init_method="env://")
    group = dist.new_group([0, 1], backend="gloo")
    found: dict[str, object] = {}
    for name in ("coalesced", "one by one"):
        if name == "one by one":
            before = param_and_grad_buffer._coalescing_manager
            gloo_reductions.apply()
            gloo_reductions.apply()
        for async_ops in (False, True):
            reduced = [torch.arange(4.0) + rank, torch.ones(3) * rank]
            with param_and_grad_buffer._coalescing_manager(group, async_ops=async_ops) as works:
                for tensor in reduced:
                    dist.all_reduce(tensor, group=group, async_op=async_ops)
            scattered = torch.zeros(2)
            if async_ops:
                works.wait()
            with param_and_grad_buffer._coalescing_manager(group, async_ops=async_ops) as works:
                dist.reduce_scatter_tensor(scattered, torch.arange(4.0) * (rank + 1), group=group, async_op=async_ops)
            if async_ops:
                works.wait()
            gathered = torch.zeros(4)
            with param_and_grad_buffer._coalescing_manager(group, async_ops=async_ops) as works:
                dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), group=group, async_op=async_ops)
            if async_ops:
                works.wait()
            found[f"{name} {async_ops}"] = [tensor.tolist() for tensor in (*reduced, scattered, gathered)]
    gloo_reductions.revert()
    found["reverted"] = param_and_grad_buffer._coalescing_manager is before
    return found


def test_reductions_are_the_same():
    for rank, found in enumerate(run_ranks(reduce_both_ways, 2)):
        assert found.pop("reverted")
        expected = [[1.0, 3.0, 5.0, 7.0], [1.0] * 3, [[0.0, 3.0], [6.0, 9.0]][rank], [0.0, 0.0, 1.0, 1.0]]
        assert list(found.values()) == [expected] * 4
