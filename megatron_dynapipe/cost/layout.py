"""How a model's layers lie over a pipeline: the one owner of "layers per stage".

    T5, 3 + 4 layers on 4 stages      encoder 0 1 │ encoder 2 decoder 0 │ decoder 1 2 │ decoder 3 head
    layers_per_stage                       2               2                  2             1

Virtual stage v is chunk v // stages of pipeline stage v % stages.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatron_dynapipe.cost.tables import EndState, IntArray, LayerState
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one virtual stage holds.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Layers per virtual stage in model order (T5: encoder layers, then decoder layers).

    Attributes:
        family: "gpt" layers all count as encoder layers.
        encoder_layers, decoder_layers: of the whole model.
        layers_per_stage: one number per virtual stage; each at least 1 for a T5, while a GPT's embedding or head may
            have a stage to itself. A stage may hold both kinds of layer.
        chunks: virtual stages per pipeline stage.

    Raises:
        ConfigError: layers not of the family's kinds, or a split that does not add up to them.
    """

    family: ModelFamily
    encoder_layers: int
    decoder_layers: int = 0
    layers_per_stage: tuple[int, ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.encoder_layers < 1 or (self.decoder_layers < 1) == (self.family is ModelFamily.T5):
            raise ConfigError(
                f"expected a {self.family} model with layers of its kinds, got {self.encoder_layers} encoder and"
                f" {self.decoder_layers} decoder layers"
            )
        layers, split = self.encoder_layers + self.decoder_layers, self.layers_per_stage
        least = 1 if self.family is ModelFamily.T5 else 0
        if not split or min(split) < least or sum(split) != layers:
            raise ConfigError(
                f"expected a layer split of {layers} layers with at least {least} on every stage, got {list(split)}"
            )
        if self.chunks < 1 or len(split) % self.chunks:
            raise ConfigError(f"{len(split)} virtual stages cannot be assigned to pipeline stages {self.chunks} each")

    @classmethod
    def equal(
        cls, family: ModelFamily, encoder_layers: int, decoder_layers: int, virtual: int, chunks: int = 1
    ) -> "PipelineLayout":
        """The same number of layers on each of `virtual` stages.

        Raises:
            ConfigError: the number of layers is not a multiple of the number of virtual stages.
        """
        layers = encoder_layers + decoder_layers
        if layers % virtual:
            raise ConfigError(
                f"{layers} layers cannot be split equally over {virtual} stages",
                hint="use a layer split of auto, or a number of stages that divides the layers",
            )
        return cls(
            family=family,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            layers_per_stage=(layers // virtual,) * virtual,
            chunks=chunks,
        )

    @property
    def virtual_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return len(self.layers_per_stage)

    @property
    def stages(self) -> int:
        """Pipeline stages, one per rank of the pipeline."""
        return self.virtual_stages // self.chunks

    @property
    def virtual_stage_layers(self) -> tuple[StageLayers, ...]:
        """What each virtual stage holds."""
        encoder_layers = self.encoder_layers
        ends = accumulate(self.layers_per_stage)
        return tuple(
            StageLayers(
                encoder=range(min(end - count, encoder_layers), min(end, encoder_layers)),
                decoder=range(max(end - count - encoder_layers, 0), max(end - encoder_layers, 0)),
                encoder_layers=encoder_layers,
                decoder_layers=self.decoder_layers,
            )
            for end, count in zip(ends, self.layers_per_stage, strict=True)
        )

    @property
    def encoder_split(self) -> tuple[int, ...]:
        """Encoder layers of each virtual stage."""
        return tuple(len(layers.encoder) for layers in self.virtual_stage_layers)

    @property
    def decoder_split(self) -> tuple[int, ...]:
        """Decoder layers of each virtual stage."""
        return tuple(len(layers.decoder) for layers in self.virtual_stage_layers)

    @property
    def decoder_state_forward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether activations hold the decoder's state beside the encoder's output."""
        return tuple(count > 0 for count in self.decoder_split[:-1])

    @property
    def decoder_state_backward(self) -> tuple[bool, ...]:
        """Per boundary v → v + 1, whether a cost model charges gradients of both states.

        By the published rule, a stage that begins in the decoder returns both, also where only the encoder's output
        was handed to it.
        """
        return tuple(count == 0 for count in self.encoder_split[1:])

    def model_state_bytes(self, state: LayerState, *, data_parallel: int, distributed_optimizer: bool) -> IntArray:
        """Parameters, gradients and optimizer state per pipeline stage: int64[stages].

        For a parameter's 2 bytes there are those of its gradient, and 12 of the optimizer (fp32 parameters and two
        moments), which the distributed optimizer shards over the replicas.
        """
        per_stage = self.parameter_bytes(state)
        sharded = -(-per_stage * 6 // data_parallel) if distributed_optimizer else per_stage * 6
        return np.asarray(per_stage * (2 + state.gradient_bytes) // 2 + sharded, np.int64)

    def parameter_bytes(self, state: LayerState) -> IntArray:
        """Of parameters, 2 bytes each, per pipeline stage: int64[stages].

        Where nothing is known but embeddings and layers, one embedding lies on the first stage and, for T5, one on the
        first decoder stage.
        """
        encoder, decoder = np.array(self.encoder_split), np.array(self.decoder_split)
        parameters = encoder * state.encoder_bytes + decoder * state.decoder_bytes
        if state.ends is not None:
            parameters += [_outside_layers(layers, state, state.ends) for layers in self.virtual_stage_layers]
            return np.asarray(parameters.reshape(self.chunks, self.stages).sum(axis=0), np.int64)
        parameters[0] += state.embedding_bytes
        if self.decoder_layers:
            parameters[int(np.flatnonzero(decoder)[0])] += state.embedding_bytes
        return np.asarray(parameters.reshape(self.chunks, self.stages).sum(axis=0), np.int64)


def _outside_layers(layers: StageLayers, state: LayerState, ends: EndState) -> int:
    """Parameter bytes of a virtual stage besides its layers'."""
    is_t5 = layers.decoder_layers > 0
    head = layers.ends_decoder if is_t5 else layers.ends_encoder
    own = bool(layers.encoder) * ends.encoder_tables + bool(layers.decoder) * ends.decoder_tables
    if layers.embeds:
        own += state.embedding_bytes + ends.positions
    if head and not (ends.tied and layers.embeds):
        own += state.embedding_bytes
    return own + (layers.ends_encoder + layers.ends_decoder) * ends.norm + head * ends.head_biases


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as equal as can be; the first stages have the layers that are left over.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if stages > layers:
        raise ConfigError(f"{layers} layers cannot be split over {stages} stages", hint="use fewer stages")
    least, more = divmod(layers, stages)
    return tuple(least + (stage < more) for stage in range(stages))


def parse_split(text: str, *, expected: str) -> tuple[int, ...]:
    """Layers per virtual stage from "9,8,8,7".

    Args:
        text: numbers of layers, separated by commas.
        expected: what is expected of which flag, for the message.

    Raises:
        ConfigError: not numbers of at least 0.
    """
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise ConfigError(f"expected {expected}, got {text!r}")
    return tuple(int(number) for number in numbers)
