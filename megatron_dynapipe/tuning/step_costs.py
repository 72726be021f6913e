"""What an iteration takes after its last backward: gradient reduction over the replicas, and the optimizer step.

    pipeline ─────────────────────────► │ reduce-scatter (or all-reduce) │ step │ all-gather
    (planned: forward, backward, transfers)  per stage; the slowest stage counts

Nothing overlaps with the pipeline. Gradients are reduced in fp32, as Megatron does for bf16. A ring's messages cross
the links inside a node first, then between nodes those of every device's own link, then inside the node again:

    inside a node of l replicas      2 (l - 1) / l · bytes          at a link inside the node
    between m nodes                  2 (m - 1) / m · bytes / l      at a link between nodes

and every hop takes its link's latency. The step reads gradient, master weight and both moments, and writes all but the
gradient and the parameter in half precision: 30 bytes a parameter.
"""

import math

import msgspec

from megatron_dynapipe.cost import LayerState
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.settings import PlannerSettings

_STORED_BYTES = 2
"""Of a parameter, as cost models count them."""
_STEP_BYTES = 30


class StepRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the reduction and the step depend on besides layout and links.

    Attributes:
        gradient_bytes: of a parameter's gradient in the reduction.
        memory_bytes_per_second: memory traffic that a device sustains.
    """

    gradient_bytes: int = 4
    memory_bytes_per_second: float = 8e11

    def __post_init__(self) -> None:
        if self.gradient_bytes < 1 or not self.memory_bytes_per_second > 0:
            raise ConfigError(
                f"expected gradients of at least 1 byte and a memory rate above 0, got {self.gradient_bytes} and"
                f" {self.memory_bytes_per_second}"
            )


def step_ns(settings: PlannerSettings, state: LayerState, rates: StepRates) -> tuple[int, int]:
    """Time of the reduction (with the all-gather of parameters) and of the optimizer step, on the slowest stage.

    Args:
        settings: layout, split, links.
        state: parameter bytes of a layer on one tensor-parallel rank.
        rates: gradients and memory.
    """
    layout, shared = settings.layout, settings.expert_parallel
    everything, experts = layout.parameter_bytes(state), layout.expert_bytes(state)
    reduction = stepped = 0.0
    for held, replicas, apart in (
        (everything - experts, settings.data_parallel, 1),
        (experts, settings.data_parallel // shared, shared),
    ):
        parameters = int(held.max()) // _STORED_BYTES
        if settings.distributed_optimizer:
            # Half an all-reduce of the gradients, and half a one of the parameters.
            size = parameters * (rates.gradient_bytes + _STORED_BYTES) / 2
            stepped += parameters / replicas
        else:
            size = parameters * rates.gradient_bytes
            stepped += parameters
        reduction += _ring_ns(settings, size, replicas, apart)
    return math.ceil(reduction), math.ceil(stepped * _STEP_BYTES / rates.memory_bytes_per_second * 1e9)


def _ring_ns(settings: PlannerSettings, size_bytes: float, replicas: int, apart: int) -> float:
    """An all-reduce of so many bytes over replicas of a stage, of which every `apart`-th takes part."""
    network = settings.network
    inside = max(1, math.gcd(replicas, network.devices_per_node // settings.tensor_parallel // apart))
    nodes = replicas // inside
    bits = size_bytes * 8
    inside_ns = 2 * (inside - 1) * (bits / inside / network.intra_node_gbps + network.intra_node_latency_us * 1e3)
    between_ns = 2 * (nodes - 1) * (bits / inside / nodes / network.inter_node_gbps)
    return inside_ns + between_ns + 2 * (nodes - 1) * network.inter_node_latency_us * 1e3
