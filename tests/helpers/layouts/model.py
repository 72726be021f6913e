"""The model of a layout: process groups, this rank's chunks, and weights by their names in the whole model.

Weights are drawn from their names and places in the whole model, so that every layout starts from the same ones.
"""

import zlib
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.models.hybrid import HybridModelConfig

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import PipelineLayout, model_of_layers
from megatron_dynapipe.costing.pattern import with_stages
from megatron_dynapipe.megatron.equip.built import built_chunks, gpt_layers, hybrid_layers
from megatron_dynapipe.megatron.equip.halves import OverlappingLayout, drop_halves
from megatron_dynapipe.megatron.hooks import fused_kernels
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.megatron.models.specs import CoreAttention
from megatron_dynapipe.megatron.models.t5_stage import T5Stage, embedding_ranks, share_weights
from megatron_dynapipe.tools.certify.parameters import entries
from tests.helpers.layouts.layout import HEADS, MAX_LENGTH, VOCABULARY, Layout
from tests.helpers.t5_models import t5_args, t5_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(layout: Layout) -> TransformerConfig:
    encoder, _ = layout.layers
    uneven = layout.split is not None
    interleaved = layout.chunks > 1 or uneven
    return TransformerConfig(
        num_layers=encoder,
        hidden_size=layout.hidden,
        num_attention_heads=HEADS,
        attention_dropout=layout.dropout,
        hidden_dropout=layout.dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=layout.chunks if interleaved and layout.chunks > 1 else None,
        is_hybrid_model=bool(layout.pattern),
        pipeline_dtype=DTYPES[layout.dtype],
        params_dtype=DTYPES[layout.dtype],
        fp16=layout.dtype == "fp16",
        bf16=layout.dtype == "bf16",
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=layout.fused,
        cross_entropy_loss_fusion=layout.fused_loss,
        deallocate_pipeline_outputs=True,  # Megatron's default in training
        transformer_impl="transformer_engine" if layout.engine else "local",
        recompute_modules=list(layout.modules),
    )


def start(layout: Layout, split: PipelineLayout | None, backend: str = "gloo") -> None:
    """Process groups and seeds, as Megatron sets them up."""
    dist.init_process_group(backend, init_method="env://")
    if layout.fused:
        fused_kernels.install(Originals())
    ranks = {}
    if split is not None:
        ranks = {"get_embedding_ranks": embedding_ranks, "get_position_embedding_ranks": embedding_ranks}
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.stages, layout.chunks if layout.chunks > 1 else None, **ranks
    )
    model_parallel_cuda_manual_seed(1)


def t5_split(layout: Layout) -> PipelineLayout | None:
    if layout.kind is not ModelFamily.T5:
        return None
    return t5_layout(*layout.layers, layout.stages, layout.split, chunks=layout.chunks)


def build(layout: Layout, split: PipelineLayout | None) -> list[torch.nn.Module]:
    """This rank's chunks, with weights drawn from their names."""
    stage, model_config = parallel_state.get_pipeline_model_parallel_rank(), config(layout)
    if split is None:
        chunks = built_chunks(decoder_only(layout, model_config))
    else:
        args = t5_args(
            padded_vocab_size=VOCABULARY,
            max_position_embeddings=MAX_LENGTH,
            position_embedding_type=layout.positions,
            relative_attention_num_buckets=8,
            dynapipe_attention=layout.attention,
            untie_embeddings_and_output_weights=not layout.tied,
            transformer_impl=model_config.transformer_impl,
        )
        chunks = [
            T5Stage(model_config, layout=split, stage=chunk * layout.stages + stage, args=args)
            for chunk in range(layout.chunks)
        ]
    for chunk in chunks:
        draw_weights(chunk)
    if split is not None and layout.chunks > 1:
        share_weights(chunks)
    return chunks


def decoder_only(layout: Layout, model_config: TransformerConfig) -> GPTModelConfig | HybridModelConfig:
    """What Megatron builds its GPTModel or HybridModel from, as `providers.decoder_only`."""
    attention = CoreAttention(layout.attention)
    shared = {
        "transformer": model_config,
        "vocab_size": VOCABULARY,
        "seq_length": MAX_LENGTH,
        "share_embeddings_and_output_weights": layout.tied,
        "position_embedding_type": layout.positions,
        "pre_wrap_hooks": [drop_halves],
    }
    if layout.pattern:
        virtual = layout.stages * layout.chunks
        split = layout.split or (layout.depth // virtual,) * virtual
        pattern = with_stages(layout.pattern, split)
        stack = hybrid_layers(model_config, attention)
        return HybridModelConfig(**shared, hybrid_stack_spec=stack, hybrid_layer_pattern=pattern)
    if layout.split is not None:
        pipeline = PipelineLayout.of_layers(model_of_layers(layout.kind, layout.depth), layout.split, layout.chunks)
        model_config.pipeline_model_parallel_layout = OverlappingLayout(pipeline.modules_per_stage, layout.stages)
    return GPTModelConfig(**shared, transformer_layer_spec=partial(gpt_layers, attention=attention))


def draw_weights(model: torch.nn.Module) -> None:
    for entry in entries(model):
        generator = torch.Generator().manual_seed(zlib.crc32(entry.key.encode()))
        whole = torch.randn(entry.global_shape, generator=generator) * 0.2
        whole += "norm" in entry.key and "weight" in entry.key
        entry.data.detach().copy_(whole[entry.global_slice()])
