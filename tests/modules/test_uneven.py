"""Stages with different numbers of replicas: slices by hand, and gradients equal to those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.costing import Network
from megatron_dynapipe.modules.uneven import UnevenPipeline, stage_of_plan
from megatron_dynapipe.tools.tuning import Layer, LayerProfile, Topology, orchestrate
from tests.helpers.processes import in_ranks, run_ranks

WIDTH = 6


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)] + [nn.Linear(WIDTH, 1)]


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 1, generator=generator)


def squares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (output - target).square().sum(), float(len(target))


def alone(rows: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, last gradients and weights of one process."""
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total, count = squares(model(batch(rows)[0]), batch(rows)[1])
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach() / count))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, model.state_dict()


Stages = list[tuple[int, int, list[int]]]
"""(first layer, end, ranks) of every stage."""


def train(rank: int, world_size: int, cases: list[tuple[Stages, int, int]], steps: int) -> list:
    """Losses, gradients and weights of this rank for each (stages, rows, units)."""
    dist.init_process_group("gloo")
    return [train_one(rank, stages, rows, units, steps) for stages, rows, units in cases]


def train_one(rank: int, stages: Stages, rows: int, units: int, steps: int):
    mine = next(at for at, (_, _, ranks) in enumerate(stages) if rank in ranks)
    module = stage_of_plan(layers(), [(first, end) for first, end, _ in stages], mine)
    if rank != stages[mine][2][0]:
        nn.init.zeros_(module[0][0].weight)  # replicas take the first one's weights
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    pipeline = UnevenPipeline(module, [ranks for _, _, ranks in stages], optimizer, squares, units=units, timeout_s=60)
    inputs, targets = batch(rows)
    losses = [pipeline.step(inputs, targets) for _ in range(steps)]
    first = stages[mine][0]

    def whole(name: str) -> str:
        number, _, rest = name.partition(".")
        return f"{int(number) + first}.{rest}"

    gradients = {whole(name): parameter.grad for name, parameter in module.named_parameters()}
    return losses, gradients, {whole(name): value for name, value in module.state_dict().items()}


def orchestrated() -> tuple[Stages, int, int]:
    """A plan that gives its stages different numbers of replicas."""

    def layer(ms: float, weights: float) -> Layer:
        return Layer(
            name="", forward_ms=(ms,), backward_ms=(ms,), boundary_bytes=1, stored_bytes=0, parameter_bytes=weights
        )

    profile = LayerProfile(name="", sizes=(1,), layers=(layer(4, 1), layer(4, 1), layer(3, 1), layer(1, 1e9)))
    network = Network(devices_per_node=1, inter_node_gbps=8, inter_node_latency_us=0)
    plan = orchestrate(profile, 2, 12, Topology(devices=3, network=network))
    assert sorted(stage.replicas for stage in plan.stages) == [1, 2]
    return [(stage.first_layer, stage.end_layer, list(stage.devices)) for stage in plan.stages], 12, plan.units


def test_gradients_are_those_of_one_process():
    """Two replicas and one, slices that do not divide, one and two in another order, three stages, a planned one."""
    cases = [
        ([(0, 2, [0, 1]), (2, 4, [2])], 12, 3),
        ([(0, 2, [0, 1]), (2, 4, [2])], 11, 4),
        ([(0, 1, [2]), (1, 4, [0, 1])], 10, 2),
        ([(0, 1, [0]), (1, 2, [2]), (2, 4, [1])], 8, 4),
        orchestrated(),
    ]
    ranks = run_ranks(train, 3, {"cases": cases, "steps": 2})
    for number, (_, rows, _) in enumerate(cases):
        losses, gradients, weights = alone(rows, 2)
        seen = set()
        for found in (rank[number] for rank in ranks):
            assert found[0] == pytest.approx(losses, rel=1e-5)
            for name, gradient in found[1].items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(found[2][name], weights[name], rtol=1e-5, atol=1e-6)
                seen.add(name)
        assert seen == set(gradients)


class Halves(nn.Module):
    """A stage that loses samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[::2]


@in_ranks(2)
def test_what_cannot_be_trained(rank):
    dist.init_process_group("gloo")
    module = nn.Linear(WIDTH, 1)
    every_rank = "expected stages that have each of 2 ranks once"
    for stages, units, said in (
        ([[0], [0, 1]], 1, rf"{every_rank}, got \[\[0\], \[0, 1\]\]"),
        ([[0, 1], []], 1, every_rank),
        ([[0], [1]], 0, "at least one unit"),
    ):
        with pytest.raises(ConfigError, match=said):
            UnevenPipeline(module, stages, None, squares, units=units)
    with pytest.raises(ConfigError, match="a plan of 4 layers, got one of 3"):
        stage_of_plan(layers(), [(0, 3)], 0)
    pipeline = UnevenPipeline(module, [[0, 1]], None, squares, units=2)
    with pytest.raises(DataError, match="at least 4 for 2 units over 2 replicas, got 3 inputs and 3 targets"):
        pipeline.step(*batch(3))
    with pytest.raises(DataError, match="got 4 inputs and 3 targets"):  # on one rank alone
        pipeline.step(batch(4)[0], batch(4 - rank)[1])
    pipeline = UnevenPipeline(Halves() if rank == 0 else module, [[0], [1]], None, squares, units=2)
    with pytest.raises(ConfigError, match="stage 0 to return one floating tensor of 2 samples, as many as it takes"):
        pipeline.step(*batch(4))
