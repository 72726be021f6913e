"""Which layers and which shared weights of a T5 each virtual pipeline stage holds. Values only; no torch.

A T5 is one line of layers in model order, cut into stages:

    encoder 0 1 2 │ encoder 3 decoder 0 │ decoder 1 2 │ decoder 3 head
          ▲                       ▲                               ▲
    word + position         word + position                     word       (tied embeddings; one copy per stage)

With several chunks per rank, virtual stage v is chunk v // ranks of the pipeline's rank v % ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from megatron_dynapipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one stage holds.

    Attributes:
        encoder, decoder: the stage's layers, by their index in the encoder and in the decoder; either may be empty.
        encoder_layers, decoder_layers: depths of the whole model.
    """

    encoder: range
    decoder: range
    encoder_layers: int
    decoder_layers: int

    @property
    def starts_encoder(self) -> bool:
        """Whether the input's tokens are embedded here."""
        return 0 in self.encoder

    @property
    def ends_encoder(self) -> bool:
        """Whether the encoder's final norm is here."""
        return self.encoder_layers - 1 in self.encoder

    @property
    def starts_decoder(self) -> bool:
        """Whether the target's tokens are embedded here."""
        return 0 in self.decoder

    @property
    def ends_decoder(self) -> bool:
        """Whether the decoder's final norm and the head are here."""
        return self.decoder_layers - 1 in self.decoder

    @property
    def embeds(self) -> bool:
        """Whether word and position embeddings are here; one copy, also where both stacks start."""
        return self.starts_encoder or self.starts_decoder


@dataclass(frozen=True, slots=True)
class T5Split:
    """The virtual stages of a T5, in model order, and how many of them each pipeline rank holds."""

    stages: tuple[StageLayers, ...]
    chunks: int = 1

    @classmethod
    def of(
        cls,
        encoder_layers: int,
        decoder_layers: int,
        stages: int,
        split: Sequence[int] | None = None,
        *,
        chunks: int = 1,
    ) -> Self:
        """Cut a T5 into `stages` × `chunks` virtual stages.

        Args:
            encoder_layers: depth of the encoder.
            decoder_layers: depth of the decoder.
            stages: number of pipeline ranks.
            split: layers per virtual stage in model order, encoder layers first; the same number on each if None.
            chunks: virtual stages per rank.

        Raises:
            ConfigError: a depth below 1, layers that cannot be split equally, or a split that does not fit.
        """
        layers = encoder_layers + decoder_layers
        if encoder_layers < 1 or decoder_layers < 1:
            raise ConfigError(
                f"expected a T5 with encoder and decoder layers, got {encoder_layers} and {decoder_layers}"
            )
        stages *= chunks
        if split is None:
            if layers % stages:
                raise ConfigError(
                    f"{layers} layers cannot be split equally over {stages} stages",
                    hint="give the number of layers of every stage",
                )
            split = [layers // stages] * stages
        if len(split) != stages or sum(split) != layers or min(split) < 1:
            raise ConfigError(
                f"expected a layer split of {layers} layers over {stages} stages with at least one on each,"
                f" got {list(split)}"
            )
        ends = [sum(split[: stage + 1]) for stage in range(stages)]
        return cls(
            tuple(
                StageLayers(
                    encoder=range(min(end - count, encoder_layers), min(end, encoder_layers)),
                    decoder=range(max(end - count - encoder_layers, 0), max(end - encoder_layers, 0)),
                    encoder_layers=encoder_layers,
                    decoder_layers=decoder_layers,
                )
                for end, count in zip(ends, split, strict=True)
            ),
            chunks,
        )

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.stages) // self.chunks

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Layers of every virtual stage."""
        return tuple(len(layers.encoder) + len(layers.decoder) for layers in self.stages)

    def of_rank(self, rank: int) -> tuple[StageLayers, ...]:
        """The chunks of a pipeline rank."""
        return self.stages[rank :: self.ranks]

    @property
    def word_embedding_stages(self) -> tuple[int, ...]:
        """Stages with a copy of the word embeddings where the head is tied to them."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.embeds or layers.ends_decoder)

    @property
    def embedding_stages(self) -> tuple[int, ...]:
        """Stages that embed tokens: the first, and the first of the decoder."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.embeds)

    @property
    def encoder_stages(self) -> tuple[int, ...]:
        """Stages with layers of the encoder."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.encoder)

    @property
    def decoder_stages(self) -> tuple[int, ...]:
        """Stages with layers of the decoder."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.decoder)

    def embedding_ranks(self, pipeline_ranks: Sequence[int]) -> list[int]:
        """Megatron's `get_embedding_ranks` and `get_position_embedding_ranks`: the first rank alone.

        So that Megatron's finalisation has no copies to look after: `shared_weights` does.
        """
        if len(pipeline_ranks) != self.ranks:
            raise ConfigError(f"expected {self.ranks} pipeline ranks, got {len(pipeline_ranks)}")
        return [pipeline_ranks[0]]

    position_embedding_ranks = embedding_ranks
