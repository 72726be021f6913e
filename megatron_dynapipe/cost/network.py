"""What it takes to hand a micro-batch from one pipeline stage to the next."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.cost.layout import PipelineLayout
from megatron_dynapipe.cost.tables import IntArray
from megatron_dynapipe.errors import ConfigError

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between devices: one kind inside a node, one between nodes.

    Ranks are counted as Megatron places them: tensor parallel first, then data parallel, then pipeline; so stages lie
    on nodes in order, `devices_per_node / (data parallel × tensor parallel)` to a node.
    """

    devices_per_node: int = 8
    intra_node_gbps: float = 4800.0
    inter_node_gbps: float = 100.0
    intra_node_latency_us: float = 0.0
    inter_node_latency_us: float = 4000.0

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "intra_node_gbps", "inter_node_gbps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("intra_node_latency_us", "inter_node_latency_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def links(self, *, virtual_stages: int, stages: int, ranks_per_stage: int) -> tuple[Reals, Reals]:
        """Latency in ns and rate in Gbit/s of every boundary between virtual stages: float64[virtual stages - 1]."""
        node = np.arange(virtual_stages) % stages * ranks_per_stage // self.devices_per_node
        same = node[:-1] == node[1:]
        latency_us = np.where(same, self.intra_node_latency_us, self.inter_node_latency_us)
        return latency_us * 1e3, np.where(same, self.intra_node_gbps, self.inter_node_gbps)

    def transfer_ns(self, message_bytes: IntArray, *, stages: int, ranks_per_stage: int) -> IntArray:
        """Time of messages over every boundary, either way: `[queries, virtual stages - 1]`, as the bytes given."""
        latency_ns, gbps = self.links(
            virtual_stages=message_bytes.shape[1] + 1, stages=stages, ranks_per_stage=ranks_per_stage
        )
        return np.asarray(np.rint(latency_ns + message_bytes * 8 / gbps), np.int64)


def boundary_bytes(
    layout: PipelineLayout, hidden: int, sizes: IntArray, inputs: IntArray, targets: IntArray, element_bytes: int = 2
) -> tuple[IntArray, IntArray]:
    """Bytes over every boundary: (activations downstream, gradients upstream), each `[queries, virtual stages - 1]`.

    Activations are those that the costs' rules charge: a stage that ends in the decoder passes on the encoder's
    output and the decoder's state, and one that begins in the decoder returns gradients for both.
    """
    decoder, encoder = np.array(layout.decoder_split), np.array(layout.encoder_split)
    ends_in_decoder = decoder[:-1] > 0
    begins_in_decoder = encoder[1:] == 0
    input_state = (sizes * inputs * hidden * element_bytes)[:, None]
    target_state = (sizes * targets * hidden * element_bytes)[:, None]
    return input_state + ends_in_decoder * target_state, input_state + begins_in_decoder * target_state
