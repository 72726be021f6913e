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

from megatron_dynapipe.cost import PipelineLayout, StageLayers
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily


@dataclass(frozen=True, slots=True)
class T5Split:
    """The virtual stages of a T5, in model order, and which of them hold shared weights."""

    layout: PipelineLayout

    @classmethod
    def of(
        cls,
        encoder_layers: int,
        decoder_layers: int,
        stages: int,
        split: Sequence[float] | None = None,
        *,
        chunks: int = 1,
    ) -> Self:
        """The layout of a T5 over `stages` × `chunks` virtual stages.

        Args:
            encoder_layers: depth of the encoder.
            decoder_layers: depth of the decoder.
            stages: number of pipeline ranks.
            split: layers per virtual stage in model order, in halves, encoder layers first; the same number on each if
                None.
            chunks: virtual stages per rank.

        Raises:
            ConfigError: a depth below 1, layers that cannot be split equally, or a split that does not fit.
        """
        virtual = stages * chunks
        if split is None:
            return cls(PipelineLayout.equal(ModelFamily.T5, encoder_layers, decoder_layers, virtual, chunks))
        if len(split) != virtual:
            raise ConfigError(f"expected a layer split over {virtual} stages, got {list(split)}")
        layout = PipelineLayout(
            family=ModelFamily.T5,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            layers_per_stage=tuple(split),
            chunks=chunks,
        )
        return cls(layout)

    @property
    def chunks(self) -> int:
        """Virtual stages per pipeline rank."""
        return self.layout.chunks

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """What each virtual stage holds."""
        return self.layout.virtual_stage_layers

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.layout.stages

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
        """Stages with attention of the encoder."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.encoder_parts.attends)

    @property
    def decoder_stages(self) -> tuple[int, ...]:
        """Stages with attention of the decoder."""
        return tuple(i for i, layers in enumerate(self.stages) if layers.decoder_parts.attends)

    def embedding_ranks(self, pipeline_ranks: Sequence[int]) -> list[int]:
        """Megatron's `get_embedding_ranks` and `get_position_embedding_ranks`: the first rank alone.

        So that Megatron's finalisation has no copies to look after: `shared_weights` does.
        """
        if len(pipeline_ranks) != self.ranks:
            raise ConfigError(f"expected {self.ranks} pipeline ranks, got {len(pipeline_ranks)}")
        return [pipeline_ranks[0]]
