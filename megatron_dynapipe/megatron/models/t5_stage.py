"""One pipeline stage of a T5, built from Megatron-core's blocks.

Upstream's `T5Model` cannot be cut into stages. Here a stage holds consecutive layers of encoder, decoder or both, an
embedding where a stack starts and the head where the decoder ends. What crosses a boundary: inside the encoder its
state, at the encoder's end its output, inside the decoder the encoder's output and the decoder's state; decoder stages
hand the encoder's output on unchanged.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.costing import PipelineLayout, stage_modules
from megatron_dynapipe.costing.state import attends
from megatron_dynapipe.megatron.models.padded_rows import AttentionRows
from megatron_dynapipe.megatron.models.positions import (
    LEARNED,
    RELATIVE,
    ROTARY,
    StackInputs,
    StackPositions,
)
from megatron_dynapipe.megatron.models.shared_weights import SharedWeight, connect_copies
from megatron_dynapipe.megatron.models.specs import CoreAttention, core_attention, engine_attention, t5_layer
from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs
from megatron_dynapipe.megatron.models.t5_stack import T5Stack
from megatron_dynapipe.runtime.shared_weights import SharedWeights


class T5Stage(LanguageModule):
    """A virtual stage of a T5.

    Megatron's training loop reads `pre_process` (an embedding is here), `post_process` (the head is here),
    `share_embeddings_and_output_weights`, `shared_embedding_or_output_weight()`, `position_embeddings`, `pg_collection`
    and `set_input_tensor`. Weights that other stages hold too are kept equal by `shared_weights`: see
    `share_weights`, which a stage calls for itself where it is its rank's only chunk.

    Args:
        config: Megatron's configuration, for the whole model.
        args: Megatron's checked arguments, which say what else the model is made of.
        layout: how its layers lie over the virtual stages.
        stage: which of these this is.
        pg_collection: this rank's process groups; Megatron's global ones if None.

    Raises:
        ConfigError: relative positions with an attention that has none, or process groups for another model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        args: argparse.Namespace,
        layout: PipelineLayout,
        stage: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.model_type = ModelType.encoder_or_decoder
        self.layout = layout
        self.stage = stage
        self.stage_modules = stage_modules(layout)[stage]
        self.vp_stage = stage // layout.stages if layout.chunks > 1 else None
        self.pre_process = self.stage_modules.embeds
        self.post_process = self.stage_modules.ends_decoder
        self.share_embeddings_and_output_weights = not args.untie_embeddings_and_output_weights
        self.positions: str = args.position_embedding_type
        self._attention = core_attention(args)
        self._takes_rows = engine_attention(args)
        self.shared_weights: SharedWeights | None = None
        self._inputs: Sequence[Tensor] = ()
        self._check()
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                position_embedding_type=LEARNED if self.positions == LEARNED else "none",
                tp_group=self.tp_group,
            )
        self._build_positions(args)
        self.encoder = self._stack(decoder=False)
        self.decoder = self._stack(decoder=True)
        if self.post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                args.padded_vocab_size,
                config=config,
                init_method=config.init_method,
                bias=self.share_embeddings_and_output_weights,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.tp_group,
            )
        self._mark_weights()
        if layout.chunks == 1:
            share_weights([self])

    @property
    def position_embeddings(self) -> torch.nn.Embedding | None:
        """The learned positions, where there are any."""
        if not self.pre_process or self.positions != LEARNED:
            return None
        positions: torch.nn.Embedding = self.embedding.position_embeddings
        return positions

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """The stage's copy of the word embeddings, if it has one."""
        if not (self.pre_process or (self.post_process and self.share_embeddings_and_output_weights)):
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
            [b, t, vocabulary / tensor-parallel size]. Under sequence parallelism states are divided in the first
            dimension: [s / tensor-parallel size, b, h].
        """
        inputs, self._inputs = self._inputs, ()  # not kept beyond their use
        encoded = inputs[0] if inputs else None
        decoded = inputs[1] if len(inputs) > 1 else None
        if self.encoder is not None:
            if self.stage_modules.starts_encoder:
                encoded = self._embed(batch.tokens, batch.encoder_row)
            stack = self._stack_inputs(self._encoder_positions, _given(encoded), batch.encoder_mask, batch.encoder_row)
            encoded = self.encoder.run(stack)
        if self.decoder is None:
            return _given(encoded)
        if self.stage_modules.starts_decoder:
            decoded = self._embed(batch.decoder_tokens, batch.decoder_row)
        row = batch.decoder_row
        stack = self._stack_inputs(self._decoder_positions, _given(decoded), batch.decoder_mask, row, causal=True)
        cross = None if row is not None else self._mask(_given(batch.cross_mask))
        decoded = self.decoder.run(stack, _given(encoded), cross)
        if not self.post_process:
            return _given(encoded), decoded
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied and self.pre_process else None
        logits, _ = self.output_layer(decoded, weight=weight)
        if batch.labels is None:
            return torch.as_tensor(logits.transpose(0, 1).contiguous())
        return torch.as_tensor(self.compute_language_model_loss(batch.labels, logits))

    def _stack_inputs(
        self,
        positions: StackPositions,
        state: Tensor,
        forbidden: Tensor | None,
        row: AttentionRows | None,
        *,
        causal: bool = False,
    ) -> StackInputs:
        if row is not None:
            return positions.of(state, None, row.max_seqlen_q, row)
        forbidden = _given(forbidden)
        mask = self._mask(forbidden, causal=causal)
        return positions.of(state, mask, forbidden.size(-1))

    def _mask(self, forbidden: Tensor, *, causal: bool = False) -> Tensor | None:
        """The mask of padded rows for the layers' attention, made once for all of a stack's layers.

        Megatron's local attention takes `forbidden` (bool[b, 1, queries, keys], of `data.segments`) as it is. Ours adds
        0 or -inf [b, 1, 1, keys], which serves all queries: a boolean mask would be turned into it, and kept, by every
        layer. A `causal` kernel, which forbids later keys too, needs none, since padding stands at the end.

        Raises:
            ConfigError: the attention is Transformer Engine's, which takes rows.
        """
        if self._takes_rows:
            raise ConfigError(
                "expected rows for the layers of Transformer Engine, got masks",
                hint="give T5StageInputs its encoder_row and decoder_row",
            )
        if self._attention is CoreAttention.MEGATRON:
            return forbidden
        padding = forbidden[:, :, :1]
        dtype = self.config.params_dtype
        return None if causal else torch.zeros_like(padding, dtype=dtype).masked_fill_(padding, -math.inf)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Checkpoint entries that any split of the same model can load; shared weights are saved by the first stage."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for weight in self._sharings:
            weight.save_once(self, self.stage, entries, prefix)
        return entries

    @property
    def _sharings(self) -> tuple[SharedWeight, ...]:
        """Every weight of the whole model that several virtual stages may hold."""
        return sharings(self.layout, self.positions, tied=self.share_embeddings_and_output_weights)

    @property
    def _biases_hide(self) -> bool:
        """Whether relative biases say which keys are forbidden; Transformer Engine's kernels are told otherwise."""
        return self.positions == RELATIVE and not self._takes_rows

    def _build_positions(self, args: argparse.Namespace) -> None:
        config = self.config
        rotary = None
        if self.positions == ROTARY:
            rotary = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=args.rotary_percent,
                rotary_interleaved=config.rotary_interleaved,
                seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
                rotary_base=args.rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
        own = self.stage_modules

        def biases(modules: range, *, bidirectional: bool) -> RelativePositionEmbedding | None:
            """[buckets, heads] of a stack that attends, whole on every tensor-parallel rank."""
            if self.positions != RELATIVE or not attends(modules):
                return None
            return RelativePositionEmbedding(
                bidirectional=bidirectional,
                init_method=config.init_method,
                num_attention_heads=config.num_attention_heads,
                relative_attention_num_buckets=args.relative_attention_num_buckets,
                relative_attention_max_distance=args.relative_attention_max_distance,
            )

        encoder = biases(own.encoder, bidirectional=True)
        decoder = biases(own.decoder, bidirectional=False)
        if encoder is not None:
            self.encoder_relative_pos_emb = encoder
        if decoder is not None:
            self.decoder_relative_pos_emb = decoder
        hide = self._biases_hide
        self._encoder_positions = StackPositions(rotary, encoder, self.tp_group, causal=False, biases_hide=hide)
        self._decoder_positions = StackPositions(rotary, decoder, self.tp_group, causal=True, biases_hide=hide)

    def _stack(self, *, decoder: bool) -> T5Stack | None:
        modules = self.stage_modules.encoder
        depth = self.stage_modules.encoder_depth
        if decoder:
            modules = self.stage_modules.decoder
            depth = self.stage_modules.decoder_depth
        if not modules:
            return None
        layer, norm = t5_layer(self.config, self._attention, decoder=decoder, biases_hide=decoder and self._biases_hide)
        return T5Stack(
            self.config,
            layer=layer,
            layer_norm=norm,
            modules=modules,
            depth=depth // self.layout.model.modules_per_layer,
            pg_collection=self.pg_collection,
        )

    def _embed(self, tokens: Tensor | None, row: AttentionRows | None) -> Tensor:
        """Word and position embeddings [length, b, h] of tokens [b, length]."""
        tokens = _given(tokens)
        positions = None if row is None else row.positions
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        embedded: Tensor = self.embedding(input_ids=tokens, position_ids=positions)
        return embedded

    def _check(self) -> None:
        biased = self.config.transformer_impl != "local" or self._attention is not CoreAttention.MEGATRON
        if self.positions == RELATIVE and not biased:
            raise ConfigError(
                "expected relative positions with an attention that adds biases, got Megatron's local one",
                hint="use --dynapipe-attention sdpa",
            )
        for group in (self.pg_collection.embd, self.pg_collection.pos_embd):
            if group is not None and group.size() > 1:
                raise ConfigError(
                    f"expected embedding groups of one rank, got one of {group.size()}: Megatron would reduce the"
                    " gradients of a T5's embeddings a second time",
                    hint="give pretrain t5_stage.embedding_ranks for words and for positions",
                )

    def _mark_weights(self) -> None:
        for weight in self._sharings:
            weight.mark(self, self.stage)
        word: Any = self.shared_embedding_or_output_weight()
        if word is not None:
            word.is_embedding_or_output_parameter = True
            if self.pre_process and self.post_process and self.share_embeddings_and_output_weights:
                word.zero_out_wgrad = True  # two uses on one stage: a fused gradient must not return garbage
        if self.post_process and not self.share_embeddings_and_output_weights:
            head: Any = self.output_layer.weight
            head.is_embedding_or_output_parameter = True


def sharings(layout: PipelineLayout, positions: str, *, tied: bool) -> tuple[SharedWeight, ...]:
    """Every weight of a whole model that several virtual stages may hold; `positions` are one of `T5_POSITIONS`."""
    stages = list(enumerate(stage_modules(layout)))
    embedding = tuple(stage for stage, modules in stages if modules.embeds)
    words = tuple(stage for stage, modules in stages if modules.embeds or modules.ends_decoder)
    weights = [SharedWeight(name=_WORDS, stages=words if tied else embedding, name_in=_name_of_words)]
    if positions == LEARNED:
        weights.append(SharedWeight(name="embedding.position_embeddings.weight", stages=embedding))
    if positions == RELATIVE:
        for stack in ("encoder", "decoder"):
            attending = tuple(stage for stage, modules in stages if attends(getattr(modules, stack)))
            name = f"{stack}_relative_pos_emb.relative_attention_bias.weight"
            weights.append(SharedWeight(name=name, stages=attending))
    return tuple(weights)


def share_weights(chunks: Sequence[T5Stage]) -> None:
    """Once all chunks of this rank are built, on every rank: make copies of shared weights equal, and keep them so."""
    pipeline = chunks[0].pp_group
    if pipeline.size() > 1 and not chunks[0].config.init_model_with_meta_device:
        shared = connect_copies(chunks[0]._sharings, {chunk.stage: chunk for chunk in chunks}, pipeline)
        for chunk in chunks:
            chunk.shared_weights = shared


_WORDS = "embedding.word_embeddings.weight"


def _name_of_words(chunk: T5Stage) -> str:
    return _WORDS if chunk.pre_process else "output_layer.weight"


def embedding_ranks(pipeline_ranks: Sequence[int]) -> list[int]:
    """Megatron's `get_embedding_ranks` and `get_position_embedding_ranks`: the first rank alone.

    So that Megatron's finalisation has no copies to look after: `shared_weights` does.
    """
    return [pipeline_ranks[0]]


def _given(tensor: Tensor | None) -> Tensor:
    """`tensor`, which the caller has given for this kind of stage."""
    assert tensor is not None, "a tensor that this stage needs is missing from its inputs or its batch"
    return tensor
