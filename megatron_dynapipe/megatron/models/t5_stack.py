"""The layers of one stack (encoder or decoder) on one stage."""

import copy
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megatron_dynapipe.megatron.models.packed_rows import CrossRows
from megatron_dynapipe.megatron.models.positions import StackInputs
from megatron_dynapipe.megatron.models.specs import layers_of


class T5Stack(TransformerBlock):
    """Some consecutive layers of an encoder or a decoder.

    Megatron's block works out from its pipeline rank which layers it has, for one stack whose layers all stages share
    alike. Here the owner says it, and the block is told that there is no pipeline.

    Args:
        config: the model's configuration; the block gets a copy of its own.
        layer: specification of one layer.
        layer_norm: class of the norm after the stack's last layer.
        modules: the block's modules, by index in the whole stack.
        depth: layers of the whole stack.
        pg_collection: this rank's process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        layer: ModuleSpec,
        layer_norm: object,
        modules: range,
        depth: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(
            config=_without_pipeline(config, depth),
            spec=TransformerBlockSubmodules(layers_of(modules, [layer] * depth), layer_norm=layer_norm),
            pre_process=True,  # takes its input as an argument
            post_process=2 * depth - 1 in modules,
            pg_collection=pg_collection,
        )
        self.first_layer = modules.start // 2
        self.depth = depth
        for built in self.layers:
            if isinstance(built.cross_attention, Attention):
                CrossRows(built)

    def run(self, inputs: StackInputs, context: Tensor | None = None, context_mask: Any = None) -> Tensor:
        """The state [length, b, h] after this block's layers.

        Args:
            inputs: the state, and what self-attention takes.
            context: the encoder's output [s, b, h], in the decoder.
            context_mask: of the attention to it; a packed row has its `cross` instead.
        """
        output: Tensor = self(
            hidden_states=inputs.state,
            attention_mask=inputs.mask,
            context=context,
            context_mask=context_mask,
            **inputs.arguments,
        )
        return output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Checkpoint entries under the layers' indices in the whole stack, so that any split can load them.

        The forms are as in Megatron's block: by default the layers of a stack lie along a new first dimension.
        """
        metadata = metadata or {}
        one_key_per_layer = metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards")
        entries: ShardedStateDict = {}
        for local, layer in enumerate(self.layers):
            index = self.first_layer + local
            local_prefix = f"{prefix}layers.{local}."
            offsets = [] if one_key_per_layer else [(0, index, self.depth)]
            layer_entries = layer.sharded_state_dict(local_prefix, offsets, metadata)
            shared_prefix = f"{prefix}layers.{index}." if one_key_per_layer else f"{prefix}layers."
            replace_prefix_for_sharding(layer_entries, local_prefix, shared_prefix)
            entries.update(layer_entries)
        if self.final_layernorm is not None:
            norm = f"{prefix}final_layernorm."
            entries.update(sharded_state_dict_default(self.final_layernorm, norm, (), metadata, tp_group=self.tp_group))
        return entries


def _without_pipeline(config: TransformerConfig, depth: int) -> TransformerConfig:
    """`config` for a stack of `depth` layers that is not cut; not validated again, since it was whole before."""
    stack_config = copy.copy(config)
    stack_config.num_layers = depth
    stack_config.pipeline_model_parallel_size = 1
    stack_config.virtual_pipeline_model_parallel_size = None
    stack_config.pipeline_model_parallel_layout = None
    return stack_config
