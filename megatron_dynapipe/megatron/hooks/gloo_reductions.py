"""Megatron's gradient reductions and parameter gathers over gloo, one by one.

Megatron's DDP wraps them in `_coalescing_manager`, which hands them to the backend as one. Gloo has no such all-reduce
for tensors of a GPU, and several ranks on one GPU can only talk over gloo: their first reduction would end the run.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _CoalescingManager

from megatron_dynapipe.megatron.hooks.originals import Originals

MODULE = "megatron.core.distributed.param_and_grad_buffer"
NAME = "_coalescing_manager"


@contextlib.contextmanager
def one_by_one(group: Any, async_ops: bool) -> Iterator[_CoalescingManager]:
    """PyTorch's manager, but with one operation for each that the block asks for."""
    state = dist.distributed_c10d._world.pg_coalesce_state
    works = _CoalescingManager()
    asked = state.setdefault(group, [])
    try:
        yield works
    finally:
        state.pop(group, None)  # from here on operations of the group are done, not written down
    for operation in asked:  # whose function has another name since PyTorch 2.13, but the same arguments
        tensors = [tensor for tensor in (operation.dst_tensor, operation.tensor) if tensor is not None]
        reduction = {} if operation.redop is None else {"op": operation.redop}
        works.append(operation.op(*tensors, **reduction, group=group, async_op=True))
    if not async_ops:
        works.wait()


def install(originals: Originals) -> None:
    """Replace the manager in Megatron's DDP for groups over gloo."""
    module = importlib.import_module(MODULE)
    original = getattr(module, NAME)

    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        if group is not None and dist.get_backend(group) == dist.Backend.GLOO:
            return one_by_one(group, async_ops)
        return original(group, device, async_ops)

    originals.replace(module, NAME, manager)
