"""One pipeline stage of a T5, built from Megatron-core's blocks.

Upstream's `T5Model` cannot be cut into stages. Here a stage holds consecutive layers of encoder, decoder or both, an
embedding where a stack starts and the head where the decoder ends. What crosses a boundary: inside the encoder its
state, at the encoder's end its output, inside the decoder the encoder's output and the decoder's state; decoder stages
hand the encoder's output on unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.T5.t5_spec import LNImpl, decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.integration.models.t5_stack import T5Stack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class T5StageInputs:
    """What a stage needs of one micro-batch besides the boundary tensors: b samples, s input and t target positions.

    Masks are True where attention is forbidden. What a stage has no use for may be None.

    Attributes:
        tokens: int64[b, s], where the encoder starts.
        decoder_tokens: int64[b, t], where the decoder starts.
        encoder_mask: bool[b, 1, s, s], with encoder layers.
        decoder_mask: bool[b, 1, t, t], causal and padding, with decoder layers.
        cross_mask: bool[b, 1, t, s], with decoder layers.
        labels: int64[b, t], on the last stage; without them it returns logits.
    """

    tokens: Tensor | None = None
    decoder_tokens: Tensor | None = None
    encoder_mask: Tensor | None = None
    decoder_mask: Tensor | None = None
    cross_mask: Tensor | None = None
    labels: Tensor | None = None


class T5Stage(LanguageModule):
    """A stage of a T5 with learned absolute positions and tied word embeddings.

    Megatron's training loop reads `pre_process` (an embedding is here), `post_process` (the head is here),
    `share_embeddings_and_output_weights`, `shared_embedding_or_output_weight()`, `position_embeddings`, `pg_collection`
    and `set_input_tensor`; its `finalize_model_grads` keeps the copies of both embeddings equal, given
    `T5Split.embedding_ranks` and `T5Split.position_embedding_ranks`.

    Args:
        config: Megatron's configuration, for the whole model.
        split: how the model is cut.
        stage: which of the stages this is.
        vocab_size: padded vocabulary.
        max_sequence_length: positions that can be embedded, of inputs and of targets.
        pg_collection: this rank's process groups; Megatron's global ones if None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        split: T5Split,
        stage: int,
        vocab_size: int,
        max_sequence_length: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.model_type = ModelType.encoder_or_decoder
        self.split, self.stage = split, stage
        self.layers = split.stages[stage]
        self.pre_process = self.layers.embeds
        self.post_process = self.layers.ends_decoder
        self.share_embeddings_and_output_weights = True
        self._inputs: Sequence[Tensor] = ()
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config, vocab_size=vocab_size, max_sequence_length=max_sequence_length, tp_group=self.tp_group
            )
        self.encoder = self._stack(encoder_model_with_local_spec(), self.layers.encoder, self.layers.encoder_layers)
        self.decoder = self._stack(decoder_model_with_local_spec(), self.layers.decoder, self.layers.decoder_layers)
        if self.post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=True,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process,
                tp_group=self.tp_group,
            )
        self._share_embeddings()

    @property
    def position_embeddings(self) -> torch.nn.Embedding | None:
        """The learned positions, where an embedding is here."""
        if not self.pre_process:
            return None
        positions: torch.nn.Embedding = self.embedding.position_embeddings
        return positions

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """The stage's copy of the tied word embeddings, if it has one."""
        if not (self.pre_process or self.post_process):
            return None
        weight: torch.nn.Parameter = (self.embedding.word_embeddings if self.pre_process else self.output_layer).weight
        return weight

    def set_input_tensor(self, input_tensor: Sequence[Tensor | None]) -> None:
        """Take the boundary tensors for the next `forward`: [encoder state], or [encoder output, decoder state].

        The first stage is given [None].
        """
        self._inputs = [tensor for tensor in input_tensor if tensor is not None]

    def forward(self, batch: T5StageInputs) -> Tensor | tuple[Tensor, Tensor]:
        """Run the stage's part of a micro-batch.

        Returns:
            The encoder's state [s, b, h]; or, after the first decoder layer, (encoder output [s, b, h], decoder state
            [t, b, h]); or on the last stage the loss of every target position [b, t], without labels the logits
            [b, t, vocabulary / tensor-parallel size].
        """
        inputs, self._inputs = self._inputs, ()  # not kept beyond their use
        encoded = inputs[0] if inputs else None
        decoded = inputs[1] if len(inputs) > 1 else None
        if self.encoder is not None:
            encoded = self._embed(batch.tokens) if self.layers.starts_encoder else encoded
            encoded = self.encoder.run(_given(encoded), _given(batch.encoder_mask))
        if self.decoder is None:
            return _given(encoded)
        decoded = self._embed(batch.decoder_tokens) if self.layers.starts_decoder else decoded
        decoded = self.decoder.run(_given(decoded), _given(batch.decoder_mask), _given(encoded), batch.cross_mask)
        if not self.post_process:
            return _given(encoded), decoded
        weight = self.shared_embedding_or_output_weight() if self.pre_process else None
        logits, _ = self.output_layer(decoded, weight=weight)
        if batch.labels is None:
            return torch.as_tensor(logits.transpose(0, 1).contiguous())
        return torch.as_tensor(self.compute_language_model_loss(batch.labels, logits))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Checkpoint entries that any split of the same model can load; shared weights are saved by the first stage."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # ties a head without an embedding
        if self.pre_process and self.stage > 0:
            for name in ("word_embeddings.weight", "position_embeddings.weight"):
                entry = entries[f"{prefix}embedding.{name}"]
                # The head's copy is replica 1, this one 2: neither is written.
                entries[f"{prefix}embedding.{name}"] = replace(entry, replica_id=(2, *entry.replica_id[1:]))
        return entries

    def _stack(self, layer: Any, layers: range, depth: int) -> T5Stack | None:
        if not layers:
            return None
        return T5Stack(
            self.config,
            layer=layer,
            layer_norm=LNImpl,
            layers=layers,
            depth=depth,
            pg_collection=self.pg_collection,
        )

    def _embed(self, tokens: Tensor | None) -> Tensor:
        """Word and position embeddings [length, b, h] of tokens [b, length]."""
        tokens = _given(tokens)
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=positions)
        return embedded

    def _share_embeddings(self) -> None:
        """Mark the weights that other stages hold too, and make the copies equal.

        `shared` keeps a copy out of the gradient norm; `shared_embedding` gives it a bucket of its own in the
        distributed optimizer, so that it is divided over the replicas in the same way on every stage.
        """
        word: Any = self.shared_embedding_or_output_weight()
        if word is not None:
            word.is_embedding_or_output_parameter = True
            if self.pre_process and self.post_process:
                word.zero_out_wgrad = True  # two uses on one stage: a fused gradient must not return garbage
            self._share(word, self.split.word_embedding_stages, self.pg_collection.embd)
        if self.position_embeddings is not None:
            positions = self.position_embeddings.weight
            self._share(positions, self.split.position_embedding_stages, self.pg_collection.pos_embd)

    def _share(self, weight: Any, stages: Sequence[int], group: torch.distributed.ProcessGroup | None) -> None:
        if len(stages) == 1:
            return
        weight.shared_embedding = True
        weight.shared = self.stage != stages[0]
        if self.pp_group.size() == 1 or self.config.init_model_with_meta_device:
            return
        if group is None or group.size() != len(stages):
            raise ConfigError(
                f"expected an embedding group over the ranks of stages {list(stages)}, got one of"
                f" {0 if group is None else group.size()} ranks",
                hint="give pretrain the split's embedding_ranks and position_embedding_ranks",
            )
        if torch.distributed.get_backend(group) == "nccl":
            weight.data = weight.data.cuda()
        torch.distributed.broadcast(weight.data, group=group, group_src=0)


def _given(tensor: Tensor | None) -> Tensor:
    """`tensor`, which the caller has given for this kind of stage."""
    assert tensor is not None, "a tensor that this stage needs is missing from its inputs or its batch"
    return tensor
