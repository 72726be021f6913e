"""Where a run's costs come from: a cost model file, or the model's shape and the device's rates."""

from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.cost import A100_RATES, CPU_RATES, DeviceRates, ModelShape
from megatron_dynapipe.cost.devices import rates_of
from megatron_dynapipe.cost.file import check_measured_model
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts

_MOST_BY_TOKENS = 4096
"""Samples of a micro-batch at most, where an iteration holds any number of them."""


def measured_costs(path: Path, shape: ModelShape, *, tensor_parallel: int) -> MeasuredCosts:
    """The costs in a file, read here; raises CostModelError where it cannot be, or is of another model."""
    costs = MeasuredCosts(path=str(path.absolute()))
    check_measured_model(costs.load().file, msgspec.structs.asdict(shape), tensor_parallel=tensor_parallel)
    return costs


def computed_costs(
    shape: ModelShape, device: torch.device, *, element_bytes: int, longest: int, most_samples: int, by_tokens: bool
) -> AnalyticCosts:
    """Costs by this device's rates, or where its name says none, by a common one's.

    Args:
        shape: of the model.
        device: of this rank.
        element_bytes: of the parameters' type.
        longest: positions of the longest sequence.
        most_samples: of an iteration.
        by_tokens: whether an iteration holds any number of samples.
    """
    return AnalyticCosts(
        shape=shape,
        rates=msgspec.structs.replace(_rates(device) or A100_RATES, element_bytes=element_bytes),
        max_size=max(most_samples, _MOST_BY_TOKENS if by_tokens else 1),
        max_length=longest,
    )


def _rates(device: torch.device) -> DeviceRates | None:
    return CPU_RATES if device.type == "cpu" else rates_of(torch.cuda.get_device_name(device))


def describe_costs(costs: MeasuredCosts | AnalyticCosts, device: torch.device) -> str:
    """Where a run's costs come from, and what they assume, for its log."""
    if isinstance(costs, MeasuredCosts):
        return f"{costs.load().name}, from {costs.path}"
    assumed = "a common server CPU's core (assumed)"
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device)
        assumed = name if rates_of(name) else f"an A100 (assumed: {name} is not in the table of devices)"
    return (
        f"computed from the model's shape for {assumed}; to predict this machine, let it be measured"
        " (--dynapipe-calibrate 20, or `megatron-dynapipe profile` and --dynapipe-cost-model)"
    )
