"""Which modules of its stacks a virtual stage has, and what lies at their ends."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_dynapipe.core.model import PipelineLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModules:
    """The modules of one virtual stage, without the head.

    Attributes:
        encoder, decoder: the stage's modules, by their index in the encoder and in the decoder; either may be empty.
            If a layer has two, 2 n and 2 n + 1 are the attention and the MLP of layer n.
        encoder_depth, decoder_depth: modules of the whole model.
    """

    encoder: range
    decoder: range
    encoder_depth: int
    decoder_depth: int

    @property
    def starts_encoder(self) -> bool:
        """Whether the input's tokens are embedded here."""
        return 0 in self.encoder

    @property
    def ends_encoder(self) -> bool:
        """Whether the encoder's final norm is here."""
        return self.encoder_depth - 1 in self.encoder

    @property
    def starts_decoder(self) -> bool:
        """Whether the target's tokens are embedded here."""
        return 0 in self.decoder

    @property
    def ends_decoder(self) -> bool:
        """Whether the decoder's final norm and the head are here."""
        return self.decoder_depth - 1 in self.decoder

    @property
    def embeds(self) -> bool:
        """Whether word and position embeddings are here; one copy, also where both stacks start."""
        return self.starts_encoder or self.starts_decoder


def stage_modules(layout: PipelineLayout) -> tuple[StageModules, ...]:
    """The modules of each virtual stage."""
    border = len(layout.model.encoder)
    cuts = accumulate(layout.modules_per_stage, initial=0)
    return tuple(
        StageModules(
            encoder=range(min(first, border), min(last, border)),
            decoder=range(max(first - border, 0), max(last - border, 0)),
            encoder_depth=border,
            decoder_depth=len(layout.model.decoder),
        )
        for first, last in pairwise(cuts)
    )
