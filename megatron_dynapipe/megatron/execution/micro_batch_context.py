"""The settings of the model's modules for each micro-batch: its recompute mode and its random state."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, is_graph_safe_cuda_rng_tracker
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from torch import nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.megatron.equip.experts import begin_pass, gatherers_of
from megatron_dynapipe.megatron.flags.refusals import RECOMPUTE_MODULES
from megatron_dynapipe.megatron.models.hybrid import STACKS

_TENSOR_PARALLEL_STATE = "model-parallel-rng"
"""Megatron's name of the state that differs between tensor-parallel ranks."""


class MicroBatchContext:
    """Sets this rank's model chunks for the micro-batch that runs next.

    Raises:
        ConfigError: the models were built with something that cannot be set for a micro-batch.
    """

    def __init__(self, models: Sequence[nn.Module], *, seed: int) -> None:
        add_up_weight_gradients(models)
        self._recompute = RecomputeSwitch(models)
        self._gatherers = gatherers_of(models)
        self._randomness: LayerRandomness | None = None
        config = get_model_config(models[0])
        if config.attention_dropout or config.hidden_dropout:
            self._randomness = LayerRandomness(models, seed=seed)

    def begin(self, iteration: int, micro_batch: int, mode: Recompute) -> None:
        """Set the modules for a forward or backward pass of this micro-batch."""
        self._recompute.set(mode)
        begin_pass(self._gatherers)
        if self._randomness is not None:
            self._randomness.begin(iteration, micro_batch)


def add_up_weight_gradients(models: Sequence[nn.Module]) -> None:
    """Let every backward pass of Transformer Engine's linear layers add to the weights' gradients.

    With `gradient_accumulation_fusion` they overwrite the gradient in the backward pass of the forward that ran first,
    which Megatron's layers mark. In Megatron's schedules that backward is the first one, too; in a plan any may be.
    The mark also says that weights in eight bits are to be made anew, for which `forget_quantised` drops them.
    """
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "is_first_microbatch"):
            vars(module)["is_first_microbatch"] = False


def forget_quantised(models: Sequence[nn.Module]) -> None:
    """Let the next forward pass of each of Transformer Engine's linears quantise its weights, which have changed since.

    A linear without the copies that it keeps makes them, whatever its micro-batch's mark says (`quantize_weight`).
    """
    for module in (module for model in models for module in model.modules()):
        if kept := getattr(module, "_fp8_workspaces", None):
            kept.clear()


class RecomputeSwitch:
    """Sets a rank's modules to a mode of recomputation, chosen by the plan for each micro-batch.

    Megatron fixes `--recompute-granularity` when it builds a model, as attributes that its modules look at in every
    forward pass. A recomputation runs inside the micro-batch's backward pass and looks at them again, so they are set
    to the micro-batch's mode before both passes.

    "full" recomputes every layer by itself, unless Megatron's `--recompute-method` and `--recompute-num-layers` say
    otherwise; "selective" recomputes the modules of `--recompute-modules`, by default the core attention.

    Raises:
        ConfigError: modules are to be recomputed that cannot be switched.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = [module for model in models for module in model.modules()]
        blocks = [module for module in modules if isinstance(module, STACKS)]
        self._configs: list[Any] = list({id(block.config): block.config for block in blocks}.values())
        self._attentions = [module for module in modules if isinstance(module, Attention)]
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        self._mode: Recompute | None = None
        recomputed = {name for config in self._configs for name in config.recompute_modules or ("core_attn",)}
        if fixed := recomputed - set(RECOMPUTE_MODULES):
            raise ConfigError(
                f"expected --recompute-modules among {', '.join(RECOMPUTE_MODULES)}, got {', '.join(sorted(fixed))}: "
                "plans choose recomputation for each micro-batch, and these are fixed when the model is built"
            )
        self._recomputed = recomputed
        self._dense = [layer for layer in layers if isinstance(layer.mlp, MLP)]
        self._of_experts = [module for module in modules if isinstance(module, MoELayer)]
        for layer in self._dense if "mlp" in recomputed else ():
            layer.mlp.register_forward_hook(_return_copied_bias)

    def set(self, mode: Recompute) -> None:
        """Let the passes that follow keep, or compute again, what `mode` says."""
        if mode is self._mode:
            return
        self._mode = mode
        for config in self._configs:
            config.recompute_granularity = None if mode is Recompute.NONE else mode.value
            if mode is Recompute.FULL and config.recompute_method is None:
                config.recompute_method = "uniform"
                config.recompute_num_layers = 1
        modules = self._recomputed if mode is Recompute.SELECTIVE else ()
        for attention in self._attentions:
            attention.checkpoint_core_attention = "core_attn" in modules
        for layer in self._dense:
            layer.recompute_mlp = "mlp" in modules
        for layer in self._of_experts:
            layer.moe_layer_recompute = "moe" in modules
            layer.shared_experts_recompute = "shared_experts" in modules


def _return_copied_bias(_mlp: nn.Module, _inputs: Any, output: Any) -> Any:
    """Megatron's `CheckpointFunction` gives what a recomputed MLP returns a backward function: the bias, a parameter
    that the MLP leaves to the layer to add, would have itself in its graph, and recomputation would never end.
    """
    hidden, bias = output
    return hidden, bias if bias is None else bias.clone()


class LayerRandomness:
    """Seeds every half of a layer of a rank's model chunks, and every embedding, before its forward pass.

    The random state of dropouts is a function of (seed, iteration, replica, micro-batch, half of a layer). Megatron
    lets one state run on from pass to pass, so that a mask depends on everything that ran before it: on the order of
    passes, on what was recomputed, on whether the iteration is run again. Here running an iteration again draws the
    same masks, and so does a recomputation, without anything being saved.

    Hooks on modules do it, so that a layer run again in a backward pass is seeded alike. Dropouts of hidden states draw
    the same masks on all tensor-parallel ranks, attention's dropouts different ones; under sequence parallelism all
    differ, as in Megatron.

    Raises:
        ConfigError: Megatron's random states live in CUDA graphs, where they cannot be set.
    """

    def __init__(self, models: Sequence[nn.Module], *, seed: int) -> None:
        if is_graph_safe_cuda_rng_tracker(get_cuda_rng_tracker()):
            raise ConfigError(
                "DynaPipe sets the random state of every layer, which it cannot where CUDA graphs hold it",
                hint="remove --te-rng-tracker and the flags of CUDA graphs, or train without dropout",
            )
        self._identity = (seed, parallel_state.get_data_parallel_rank())
        self._sequence_parallel = get_model_config(models[0]).sequence_parallel
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self._pass = (0, 0)
        self._embedded = 0
        for chunk, model in enumerate(models):
            self._register(model, first_embedding=0 if stage == 0 and chunk == 0 else 1)

    def begin(self, iteration: int, micro_batch: int) -> None:
        """The passes that follow are of this micro-batch of this iteration."""
        self._pass = (iteration, micro_batch)
        self._embedded = 0

    def _register(self, model: nn.Module, *, first_embedding: int) -> None:
        for name, module in model.named_modules():
            if isinstance(module, LanguageModelEmbedding):
                module.register_forward_pre_hook(functools.partial(self._embed, first_embedding))
            elif isinstance(module, STACKS):
                stack = name.rpartition(".")[2]
                first = getattr(module, "first_layer", None)  # a T5's stack counts its layers from 1
                for local, layer in enumerate(module.layers):
                    index = layer.layer_number - 1 if first is None else first + local
                    layer.register_forward_pre_hook(functools.partial(self._seed, f"{stack}.{index}"))
                    # The stage after may begin with it.
                    layer.mlp.register_forward_pre_hook(functools.partial(self._seed, f"{stack}.{index}.mlp"))

    def _embed(self, first: int, module: Any, inputs: Any) -> None:
        """A T5 embeds twice: the encoder's tokens on its first stage, then, there or later, the decoder's."""
        number = first + self._embedded
        self._embedded += 1
        self._seed(f"embedding.{number}", module, inputs)

    def _seed(self, place: str, _module: Any, _inputs: Any) -> None:
        tracker = get_cuda_rng_tracker()
        torch.cuda.manual_seed(self._derive(place, self._tensor_rank))
        tracker.states_[_TENSOR_PARALLEL_STATE] = torch.cuda.get_rng_state()
        if not self._sequence_parallel:
            torch.cuda.manual_seed(self._derive(place, "all"))

    def _derive(self, place: str, whose: object) -> int:
        key = repr((*self._identity, *self._pass, place, whose)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1
