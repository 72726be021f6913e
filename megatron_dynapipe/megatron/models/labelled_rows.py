"""The last layer's MLP, the last norm, the head and the loss over positions with labels alone.

    last layer    attention [s, b, h] ──► rows with labels [n, 1, h] ──► MLP ──► norm ──► head, loss [1, n]

A position without a label has no gradient from there on, so that leaving it out is exact. Rows are taken where
Megatron's layer would add cross-attention to its states, which a decoder-only layer lacks; a stage that begins
with the last layer's MLP takes them too, so that messages keep their shapes. They are taken before the last norm where
experts count all positions, and on a stage that holds no layer.

Collation pads the rows with some that do not count, so that there always are some: every pass runs the same modules,
and its gradients become ready as other replicas' do. Under sequence parallelism each rank takes an even part.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.megatron.models.hybrid import DECODER_ONLY, final_norm


class RowGather(IdentityFuncOp):
    """Takes rows out of states.

    Attributes:
        rows: int64[n], position · samples + sample of each, for the passes that follow; None takes all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor | None = None
        self.shards: torch.distributed.ProcessGroup | None = None

    def forward(self, *_: object, **__: object) -> Any:
        """Megatron's form of adding a bias and a residual: a function of states, and of what else it adds."""
        return self.take

    def take(self, states: Tensor, *_: object) -> Tensor:
        """[s, b, h] → [n, 1, h], or this rank's parts of both under sequence parallelism."""
        if (rows := self.rows) is None:
            return states
        if self.shards is not None:
            states = gather_from_sequence_parallel_region(states, group=self.shards)
            rows = rows.chunk(self.shards.size())[self.shards.rank()]
        return states.reshape(-1, states.size(-1)).index_select(0, rows).unsqueeze(1)

    def before(self, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook before a module of states."""
        return self.take(inputs[0]), *inputs[1:]


def row_gather(models: Sequence[nn.Module]) -> RowGather:
    """The module that takes the rows in a rank's model chunks; it becomes a part of them."""
    gather = RowGather()
    for chunk in unwrap_model(list(models)):
        if isinstance(chunk, DECODER_ONLY) and chunk.post_process:
            _install(chunk, gather)
    return gather


def _install(model: Any, gather: RowGather) -> None:
    if model.config.sequence_parallel and model.config.tensor_model_parallel_size > 1:
        gather.shards = parallel_state.get_tensor_model_parallel_group()
    last = model.decoder.layers[-1] if len(model.decoder.layers) else None
    if last is not None and not isinstance(last.mlp, IdentityOp) and not _counts_all_positions(last.mlp):
        last.cross_attn_bda = gather
        dispatcher: Any = getattr(last.mlp, "token_dispatcher", None)
        if hasattr(dispatcher, "gather"):  # which `equip.experts` asks
            dispatcher.gather = gather
    else:
        norm = final_norm(model)
        (model.output_layer if norm is None else norm).register_forward_pre_hook(gather.before)


def _counts_all_positions(mlp: nn.Module) -> bool:
    """Whether experts do more with positions than each by itself; routers that are not equipped may."""
    routers = [module for module in mlp.modules() if isinstance(module, TopKRouter)]
    return any(getattr(router, "adds_terms", True) for router in routers)
