"""What the order search is given; shared by the native core's caller and its Python twin."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dynapipe.cost import LayerTables, Links, PipelineLayout
from megatron_dynapipe.planning.problem import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """A batch in the order in which it is cut, and what its micro-batches cost.

    Attributes:
        inputs, targets: int64[samples], padded lengths; targets 0 for decoder-only models.
        modes: one layer's costs under each recompute mode that may be chosen.
        layout: layers per virtual stage.
        model_state_bytes: int64[ranks].
        memory_limit_bytes: of one device, model state included.
        replicas: data-parallel replicas.
        links: what messages between stages take.
        bytes_per_position: of one hidden state.
        forward_only: no backward runs.
        peak_covers_backward: as in `PipelineProblem`.
    """

    inputs: IntArray
    targets: IntArray
    modes: Sequence[LayerTables]
    layout: PipelineLayout
    model_state_bytes: IntArray
    memory_limit_bytes: int
    replicas: int
    links: Links
    bytes_per_position: int
    forward_only: bool = False
    peak_covers_backward: bool = False
