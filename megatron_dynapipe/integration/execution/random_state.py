"""The random state of dropouts as a function of (seed, iteration, replica, micro-batch, layer).

Megatron lets one state run on from pass to pass, so that a mask depends on everything that ran before it: on the order
of passes, on what was recomputed, on whether the iteration is run again. Here each layer begins with a state of its
own. Running an iteration again draws the same masks, and so does a recomputation, without anything being saved.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, is_graph_safe_cuda_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn

from megatron_dynapipe.errors import ConfigError

_TENSOR_PARALLEL_STATE = "model-parallel-rng"
"""Megatron's name of the state that differs between tensor-parallel ranks."""


class LayerRandomness:
    """Seeds every layer of a rank's model chunks at the start of its forward pass.

    Hooks on layers and embeddings do it, so that a layer run again in a backward pass is seeded alike. Dropouts of
    hidden states draw the same masks on all tensor-parallel ranks, those of attention different ones; under sequence
    parallelism all differ, as in Megatron.

    Args:
        models: this rank's model chunks, the first stage's first one first.
        seed: of the run.
        replica: data-parallel replica of this rank.
        tensor_rank: tensor-parallel rank of this rank.
        stage: pipeline stage of this rank.

    Raises:
        ConfigError: Megatron's random states live in CUDA graphs, where they cannot be set.
    """

    def __init__(self, models: Sequence[nn.Module], *, seed: int, replica: int, tensor_rank: int, stage: int) -> None:
        if is_graph_safe_cuda_rng_tracker(get_cuda_rng_tracker()):
            raise ConfigError(
                "DynaPipe sets the random state of every layer, which it cannot where CUDA graphs hold it",
                hint="remove --te-rng-tracker and the flags of CUDA graphs, or train without dropout",
            )
        self._identity = (seed, replica)
        self._tensor_rank = tensor_rank
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
            elif isinstance(module, TransformerBlock):
                stack = name.rpartition(".")[2]
                first = getattr(module, "first_layer", None)  # a T5's stack counts its layers from 1
                for local, layer in enumerate(module.layers):
                    index = layer.layer_number - 1 if first is None else first + local
                    layer.register_forward_pre_hook(functools.partial(self._seed, f"{stack}.{index}"))

    def _embed(self, first: int, module: Any, inputs: Any) -> None:
        """A T5 embeds twice: the encoder's tokens on its first stage, then, there or later, the decoder's."""
        number = first + self._embedded
        self._embedded += 1
        self._seed(f"embedding.{number}", module, inputs)

    def _seed(self, place: str, module: Any, _inputs: Any) -> None:
        tracker = get_cuda_rng_tracker()
        torch.cuda.manual_seed(self._derive(place, self._tensor_rank))
        tracker.states_[_TENSOR_PARALLEL_STATE] = torch.cuda.get_rng_state()
        if not module.config.sequence_parallel:
            torch.cuda.manual_seed(self._derive(place, "all"))

    def _derive(self, place: str, whose: object) -> int:
        key = repr((*self._identity, *self._pass, place, whose)).encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def has_dropout(config: Any) -> bool:
    """Whether passes through a model of this configuration draw random numbers at all."""
    return bool(config.attention_dropout or config.hidden_dropout)
