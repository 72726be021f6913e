"""The stages of a rank, built and wrapped by Megatron, with weights that do not depend on how layers are split."""

import zlib
from typing import Any


def build(setup: Any) -> tuple[list[Any], Any]:
    """The (virtual) stages of this rank, wrapped by Megatron, and their optimizer."""
    from megatron_dynapipe.megatron.equip.built import built_stages
    from megatron_dynapipe.megatron.flags.from_megatron import run_config

    run = setup.args
    layout = setup.layout or run_config(run, setup.family).planner.layout
    modules = [stage.to(device=setup.device, dtype=setup.dtype) for stage in built_stages(run, setup.family, layout)]
    return wrapped(setup, modules)


def wrapped(setup: Any, modules: list[Any]) -> tuple[list[Any], Any]:
    """Stages with drawn weights under Megatron's data parallelism, and their optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    run = setup.args
    config, models = get_model_config(modules[0]), []
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=run.accumulate_allreduce_grads_in_fp32)
    for chunk, module in enumerate(modules):
        draw_weights(module)
        whole = Float16Module(config, module) if run.bf16 else module
        models.append(DistributedDataParallel(config, ddp, whole, disable_bucketing=chunk > 0))
    options = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=run.bf16, params_dtype=run.params_dtype)
    return models, get_megatron_optimizer(options, models)


def weights_of_products(models: list[Any], run: Any) -> int:
    """Parameters by which every position of a GPT is multiplied on this rank: all but input embeddings."""
    named = [pair for model in models for pair in model.named_parameters()]
    own = sum(parameter.numel() for name, parameter in named if "embeddings" not in name)
    tied = not run.untie_embeddings_and_output_weights  # which makes the last stage's words its head
    words = [parameter.numel() for name, parameter in named if tied and "word_embeddings" in name]
    return own + sum(words)


def draw_weights(module: Any) -> None:
    """Weights that depend on a parameter's place in the whole model alone, so that all layer splits start equal.

    They are drawn where they lie: a processor takes half a minute for two billion.
    """
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    parameters = dict(module.named_parameters())
    for name, entry in module.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
        if isinstance(entry, ShardedTensor) and name in parameters:
            device = parameters[name].device
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(zlib.crc32(entry.key.encode()))
                whole = torch.randn(entry.global_shape, device=device) * 0.02
            whole += "norm" in entry.key and "weight" in entry.key
            parameters[name].data.copy_(whole[entry.global_slice()])
