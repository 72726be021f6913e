"""Reading which tensors a checkpoint has, with a PyTorch that says more of them than Megatron expects.

Megatron hands all of PyTorch's `TensorProperties` to `torch.empty`. Since PyTorch 2.15 there are strides among them
(pytorch#194251), which `torch.empty` refuses: a run ended where it compares a checkpoint with its model, as most values
of `--dist-ckpt-strictness` ask, or looks for states that Transformer Engine's layers lack (`extra_states`).

This goes when `tests/megatron/entry/test_checkpoints.py` passes without it on the newest PyTorch.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader


def without_strides(load_tensors_metadata: Callable[..., object]) -> Callable[..., object]:
    """`load_tensors_metadata` that is not told of strides, which no tensor's place in a checkpoint depends on."""

    @functools.wraps(load_tensors_metadata)
    def load(self: Any, checkpoint_dir: Any, metadata: Any = None) -> Any:
        if metadata is None:
            metadata = FileSystemReader(checkpoint_dir).read_metadata()
        for entry in metadata.state_dict_metadata.values():
            vars(getattr(entry, "properties", entry)).pop("strides", None)
        return load_tensors_metadata(self, checkpoint_dir, metadata)

    return load
