"""How a model's layers lie over a pipeline, and what that makes each stage cost."""

from dataclasses import dataclass

import numpy as np

from megatron_dynapipe.cost.tables import ABSENT, IntArray, LayerState, LayerTables, Row
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Layers per virtual stage in model order (T5: encoder layers, then decoder layers).

    Virtual stage v is chunk v // stages of pipeline rank v % stages. A stage may hold both kinds of layer.

    Attributes:
        family: "gpt" layers all count as encoder layers.
        encoder_layers, decoder_layers: of the whole model.
        layers_per_stage: one number per virtual stage; each at least 1 for a T5, while a GPT's embedding or head may
            have a stage to itself.
        chunks: virtual stages per pipeline rank.
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
            raise ConfigError(f"{len(split)} virtual stages cannot be dealt to ranks {self.chunks} each")

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
        """Virtual stages over all ranks."""
        return len(self.layers_per_stage)

    @property
    def stages(self) -> int:
        """Pipeline ranks."""
        return self.virtual_stages // self.chunks

    @property
    def encoder_split(self) -> tuple[int, ...]:
        """Encoder layers of each virtual stage."""
        ends = np.minimum(np.cumsum(self.layers_per_stage), self.encoder_layers)
        return tuple(int(n) for n in np.diff(ends, prepend=0))

    @property
    def decoder_split(self) -> tuple[int, ...]:
        """Decoder layers of each virtual stage."""
        return tuple(n - e for n, e in zip(self.layers_per_stage, self.encoder_split, strict=True))

    def model_state_bytes(self, state: LayerState, *, data_parallel: int, distributed_optimizer: bool) -> IntArray:
        """Parameters, gradients and optimizer state per pipeline rank: int64[stages].

        8 times the parameter bytes (2-byte parameters and gradients, fp32 parameters and two moments), of which the
        distributed optimizer shares six over the replicas. One embedding lies on the first stage and, for T5, one on
        the first decoder stage.
        """
        encoder, decoder = np.array(self.encoder_split), np.array(self.decoder_split)
        parameters = encoder * state.encoder_bytes + decoder * state.decoder_bytes
        parameters[0] += state.embedding_bytes
        if self.decoder_layers:
            parameters[int(np.flatnonzero(decoder)[0])] += state.embedding_bytes
        per_rank = parameters.reshape(self.chunks, self.stages).sum(axis=0)
        shared = -(-per_rank * 6 // data_parallel) if distributed_optimizer else per_rank * 6
        return np.asarray(per_rank * 2 + shared, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """What micro-batches cost on every virtual stage: int64 `[queries, virtual stages]`, in ns and bytes.

    Where `feasible` (bool `[queries]`) is False the other values mean nothing.
    """

    forward_ns: IntArray
    backward_ns: IntArray
    stored_bytes: IntArray
    peak_bytes: IntArray
    feasible: np.ndarray[tuple[int], np.dtype[np.bool_]]


STAGE_ROWS = 6
"""Rows of `stage_knots`: forward, backward, stored, and the peaks of the encoder's and the decoder's last layer and the
head."""


def stage_knots(tables: LayerTables, layout: PipelineLayout, inputs: IntArray, targets: IntArray) -> IntArray:
    """Stage costs at every size of the grid: `[queries, virtual stages, STAGE_ROWS, sizes]`, `ABSENT` as the tables.

    A stage's forward (backward) is the sum of its layers', plus the head on the last, and so is what it stores, plus
    the encoder's output where it has decoder layers alone; its peak is the largest, over its layers and the head, of
    what those before it stored and that one's own peak.
    """
    knots = tables.knots(inputs, targets)
    e, d = np.array(layout.encoder_split)[:, None], np.array(layout.decoder_split)[:, None]
    row = {r: knots[:, None, r, :] for r in Row}
    last = np.zeros_like(e)
    last[-1] = 1
    encoder_end = (e - 1) * row[Row.ENCODER_STORED] + row[Row.ENCODER_PEAK]
    given = ((e == 0) & (d > 0)) * row[Row.ENCODED_STORED]
    decoder_end = given + e * row[Row.ENCODER_STORED] + (d - 1) * row[Row.DECODER_STORED] + row[Row.DECODER_PEAK]
    layers_stored = given + e * row[Row.ENCODER_STORED] + d * row[Row.DECODER_STORED]
    costs = np.stack(
        [
            e * row[Row.ENCODER_FORWARD] + d * row[Row.DECODER_FORWARD] + last * row[Row.HEAD_FORWARD],
            e * row[Row.ENCODER_BACKWARD] + d * row[Row.DECODER_BACKWARD] + last * row[Row.HEAD_BACKWARD],
            layers_stored + last * row[Row.HEAD_STORED],
            np.where(e > 0, encoder_end, 0),
            np.where(d > 0, decoder_end, 0),
            last * (layers_stored + row[Row.HEAD_PEAK]),
        ],
        axis=2,
    )
    return np.where(knots[:, None, None, 0, :] == ABSENT, ABSENT, costs)


def stage_costs(
    tables: LayerTables, layout: PipelineLayout, sizes: IntArray, inputs: IntArray, targets: IntArray
) -> StageCosts:
    """Costs of micro-batches of the given shapes on every virtual stage.

    Args:
        tables: one layer's costs.
        layout: layers per virtual stage.
        sizes: int64[queries], samples of each micro-batch.
        inputs: int64[queries], padded input lengths.
        targets: int64[queries], padded target lengths; 0 for decoder-only models.
    """
    knots = stage_knots(tables, layout, inputs, targets)
    flat = knots.reshape(len(sizes), -1, len(tables.sizes))
    rows = tables.at_sizes(flat, sizes).reshape(len(sizes), layout.virtual_stages, STAGE_ROWS)
    stored = rows[:, :, 2]
    return StageCosts(
        forward_ns=rows[:, :, 0],
        backward_ns=rows[:, :, 1],
        stored_bytes=stored,
        peak_bytes=np.maximum(rows[:, :, 3:].max(axis=2), stored),
        feasible=rows[:, 0, 0] != ABSENT,
    )
