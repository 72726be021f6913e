"""Megatron's own `pretrain` of its GPT under its own schedules, with nothing of DynaPipe's in between.

Of this project it has the CUDA stubs, and the dataset's sampler and reader: the same samples in every
iteration. A micro-batch is two whole samples, which all have one length.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_dynapipe import cpu
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.indexed import IndexedReader
from megatron_dynapipe.megatron.hooks import repairs
from megatron_dynapipe.megatron.models.hybrid import PlannedHybridStack
from megatron_dynapipe.megatron.models.specs import ATTENTION, MLP, CoreAttention, with_classes, without
from megatron_dynapipe.sampling import LengthTable, Sampler, SamplerSettings
from tests.helpers.entry_scripts import record_losses

SIZE = 2
_LAYER = get_gpt_layer_local_spec()


def stack_of(layer: ModuleSpec, attention: str = "attention_layer") -> ModuleSpec:
    """A HybridModel's modules, from a GPT's layers."""
    modules = {attention: without(layer, MLP), "mlp_layer": without(layer, ATTENTION)}
    return ModuleSpec(
        module=PlannedHybridStack, params={"norm": WrappedTorchNorm}, submodules=HybridStackSubmodules(**modules)
    )


LOCAL_STACK = stack_of(_LAYER)
"""What a HybridModel is made of without Transformer Engine, for Megatron's `--spec`; also of 0.18, without builders."""


def micro_batches(data: Path) -> Iterator[torch.Tensor]:
    """This replica's micro-batches of whole samples, [size, tokens], from the iteration that comes next."""
    args = get_args()
    settings = SamplerSettings(
        family=ModelFamily.GPT,
        seed=args.seed,
        samples_per_iteration=args.global_batch_size,
        max_input_length=args.seq_length + 1,
    )
    sampler, reader = Sampler(LengthTable.read(data, "train"), settings), IndexedReader(data / "train")
    iteration = args.iteration
    while True:
        replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        numbers = sampler.batch(iteration).sample_ids[replica::replicas]
        for start in range(0, len(numbers), SIZE):
            samples = [np.concatenate(reader[sample]).astype(np.int64) for sample in numbers[start : start + SIZE]]
            yield torch.from_numpy(np.stack(samples))
        iteration += 1


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None, layer=None):
    """Megatron's GPTModel, or with a pattern its HybridModel, of local layers in place of Transformer Engine's."""
    args = get_args()
    latent = args.multi_latent_attention
    layer = layer or get_gpt_layer_local_spec(
        num_experts=args.num_experts, normalization=args.normalization, multi_latent_attention=latent
    )
    if latent:  # Megatron's local attention has one size of heads
        layer = with_classes(layer, {DotProductAttention: CoreAttention.SDPA.module})
    if args.hybrid_layer_pattern is None:
        model = partial(GPTModel, transformer_layer_spec=layer)
    else:
        stack = stack_of(layer, "mla_layer") if latent else LOCAL_STACK
        model = partial(HybridModel, hybrid_stack_spec=stack, hybrid_layer_pattern=args.hybrid_layer_pattern)
    return model(
        config=config or core_transformer_config_from_args(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def forward_step(batches, model):
    samples = next(batches)
    tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    length = tokens.size(1)
    mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    return model(tokens, positions, mask, labels=labels), loss_function


def loss_function(losses):
    total, tokens = losses.sum(), torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def pretrain_on(datasets):
    """Megatron's own pretraining by the command line, over what `datasets` gives on every rank."""
    datasets.is_distributed = True
    args = parse_and_validate_args(extra_args_provider=cpu.set_args_defaults if cpu.is_enabled() else None)
    pretrain(
        cfg_container=pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=model_provider,
    )


def train(*, rank: int, world_size: int, argv: list[str], data: str, patched: bool = False) -> dict:
    """On one rank: the losses by iteration (last stage), and the names of the schedules that ran.

    Megatron alone cannot resume a distributed optimizer with PyTorch's Adam, not even from its own checkpoint:
    `patched` applies DynaPipe's patches of it.
    """
    if patched:
        repairs.apply()
    losses, schedules = record_losses(), set()
    factory = training.get_forward_backward_func

    def noted(*arguments, **keywords):
        schedule = factory(*arguments, **keywords)
        schedules.add(schedule.__name__)
        return schedule

    training.get_forward_backward_func = noted

    def datasets(samples, vp_stage=None):
        return (micro_batches(Path(data)), None, None)

    sys.argv = ["pretrain_gpt.py", *argv, "--micro-batch-size", str(SIZE), "--dataloader-type", "external"]
    sys.argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "511", "--no-one-logger"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        pretrain_on(datasets)
    return {"losses": losses, "schedules": sorted(schedules)}
