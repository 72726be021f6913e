"""Memory that a rank's model holds throughout: counted from its real modules, not assumed from its shape."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter's copies on a rank.

    Attributes:
        gradient: in the buffer that gradients are added up in.
        optimizer: master copy and moments.
        optimizer_shards: ranks that share the optimizer's states.
    """

    gradient: int
    optimizer: int
    optimizer_shards: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """As Megatron's arguments ask: gradients in fp32 or as parameters, Adam's two moments or SGD's one."""
        is_half = args.params_dtype.itemsize < 4
        moments = {"adam": 2, "sgd": 1}.get(args.optimizer, 2)
        return cls(
            gradient=4 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize,
            optimizer=4 * (moments + is_half),  # the master copy of half-precision parameters
            optimizer_shards=args.data_parallel_size if args.use_distributed_optimizer else 1,
        )

    def total(self, modules: Sequence[torch.nn.Module]) -> int:
        """Parameters, gradients and optimizer states of a rank's modules, and their buffers.

        Embeddings count where they lie, a weight that two modules share once.
        """
        parameters = {id(p): p for module in modules for p in module.parameters()}.values()
        held = sum(p.numel() * p.element_size() for p in parameters)
        held += sum(b.numel() * b.element_size() for module in modules for b in module.buffers())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        return held + trained * self.gradient + -(-trained * self.optimizer // self.optimizer_shards)
