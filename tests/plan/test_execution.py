"""Whatever `verify` accepts runs: random plans on real gloo processes, with a tiny model and a strict transport."""

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Channel,
    Forward,
    Load,
    Payload,
)
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors
from megatron_dynapipe.planning.lowering import Topology, lower
from megatron_dynapipe.planning.schedules import SCHEDULES
from megatron_dynapipe.planning.schedules.list_scheduling import Policy, Rule, list_schedule
from megatron_dynapipe.runtime.executor import PipelineExecutor
from megatron_dynapipe.runtime.platform import CpuPlatform
from megatron_dynapipe.units import ModelFamily, Shape
from tests.helpers.lists import verify_lists
from tests.helpers.plans import divided, layout_of, random_problem
from tests.helpers.processes import run_ranks
from tests.plan.strict_transport import StrictTransport

HIDDEN = 4
PLANS_PER_PIPELINE = 70


class RandomPlan:
    """A pipeline with micro-batches of random shapes under a random schedule; the same on every rank."""

    def __init__(self, seed: int, stages: int) -> None:
        choose = random.Random(seed)
        self.micro_batches = choose.randint(0, 7)
        self.chunks = choose.choice([1, 1, 1, 2, 3])
        self.forward_only = choose.random() < 0.15
        self.family = choose.choice(list(ModelFamily))
        virtual = stages * self.chunks
        self.tensors = boundary_tensors(layout_of(self.family, virtual, encoder_layers=choose.randint(1, virtual - 1)))
        t5 = self.family is ModelFamily.T5
        self.shapes = [
            Shape(choose.randint(1, 3), 8 * choose.randint(1, 4), 8 * choose.randint(1, 2) if t5 else 0)
            for _ in range(self.micro_batches)
        ]
        problem = random_problem(
            self.micro_batches,
            stages,
            chunks=self.chunks,
            forward_only=self.forward_only,
            seed=seed,
            memory_limit_bytes=choose.choice([10**9, 60, 35, 21]),
        )
        order = None
        if choose.random() < 0.7:  # With several chunks, stages short of memory may have no list schedule.
            depths = tuple(choose.randint(1, 6) for _ in range(stages))
            order = list_schedule(problem, Policy(depths, choose.choice([Rule.BACKWARD_FIRST, Rule.FORWARD_FIRST])))
        if order is None:
            order = SCHEDULES[choose.choice(sorted(SCHEDULES))](problem)
        if choose.random() < 0.4:
            order = divided(order, seed)
        boundaries = BoundarySettings(tensors=self.tensors, hidden_size=HIDDEN).shapes(self.shapes)
        self.lists = lower(
            order, Topology(stages=stages, chunks=self.chunks, shapes=boundaries, forward_only=self.forward_only)
        )
        verify_lists(self.lists, micro_batches=self.micro_batches, chunks=self.chunks, forward_only=self.forward_only)


class TinyModel:
    """One matrix per virtual stage, on every tensor that passes; a T5's decoder state begins from its own data."""

    def __init__(self, plan: RandomPlan, seed: int, virtual_stages: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plan, self.last = plan, virtual_stages - 1
        self.weights = [torch.randn(HIDDEN, HIDDEN, generator=generator) for _ in range(virtual_stages)]
        for weight in self.weights:
            weight.requires_grad_()
        self.data = [
            (torch.randn(i, n, HIDDEN, generator=generator), torch.randn(max(t, 1), n, HIDDEN, generator=generator))
            for n, i, t in plan.shapes
        ]

    def forward(self, stage: int, row: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = [torch.tanh(tensor @ self.weights[stage]) for tensor in inputs]
        tensors_after = len(self.plan.tensors[stage]) if stage < self.last else 1
        if tensors_after > len(outputs):
            outputs.append(torch.tanh(self.data[row][1] @ self.weights[stage] + outputs[0].mean()))
        return outputs

    def gradients_of_everything(self) -> list[torch.Tensor | None]:
        """Without any pipeline."""
        for row in range(self.plan.micro_batches):
            tensors = [self.data[row][0]]
            for stage in range(self.last + 1):
                tensors = self.forward(stage, row, tensors)
            sum(tensor.sum() for tensor in tensors).backward()
        return [weight.grad for weight in self.weights]


class Handlers:
    def __init__(self, model: TinyModel, rank: int, stages: int) -> None:
        self.model, self.rank, self.stages = model, rank, stages
        self.graphs = {}

    def load(self, step, buffers):
        buffers.put(Buffer.DATA, step.micro_batch, 0, self.model.data[step.micro_batch])

    def forward(self, step, buffers):
        row, chunk = step.micro_batch, step.chunk
        stage = chunk * self.stages + self.rank
        data = buffers.get(Buffer.DATA, row, 0)
        inputs = [data[0]] if stage == 0 else buffers.tensors(Buffer.INPUT, row, chunk)
        for tensor in inputs if stage else ():
            tensor.requires_grad_()
        outputs = self.model.forward(stage, row, inputs)
        self.graphs[row, chunk] = inputs, outputs
        if stage < self.model.last:
            buffers.put(Buffer.OUTPUT, row, chunk, [tensor.detach() for tensor in outputs])

    def backward(self, step, buffers):
        row, chunk = step.micro_batch, step.chunk
        stage = chunk * self.stages + self.rank
        inputs, outputs = self.graphs.pop((row, chunk))
        if stage == self.model.last:
            sum(tensor.sum() for tensor in outputs).backward()
        else:
            torch.autograd.backward(outputs, list(buffers.tensors(Buffer.OUTPUT_GRAD, row, chunk)))
        if stage > 0:
            buffers.put(Buffer.INPUT_GRAD, row, chunk, [tensor.grad for tensor in inputs])


def run_plans(*, rank: int, world_size: int, seeds: list[int]) -> int:
    dist.init_process_group("gloo", init_method="env://")
    channels = [Channel(kind, kind is Payload.ACTIVATION, wraps) for kind, wraps in product(Payload, (False, True))]
    groups = {channel: dist.new_group(backend="gloo") for channel in channels}
    for seed in seeds:
        plan = RandomPlan(seed, world_size)
        virtual = world_size * plan.chunks
        model, expected = TinyModel(plan, seed, virtual), TinyModel(plan, seed, virtual)
        handlers = Handlers(model, rank, world_size)
        executor = PipelineExecutor(StrictTransport(groups), CpuPlatform(), stages=world_size, dtype=torch.float32)
        executor.register_handler(Load, handlers.load)
        executor.register_handler(Forward, handlers.forward)
        executor.register_handler(Backward, handlers.backward)
        executor.register_handler(BackwardInput, handlers.backward)
        executor.register_handler(BackwardWeight, lambda step, buffers: None)
        executor.execute(StagePlan(stage=rank, instructions=plan.lists[rank], predicted=()))
        if plan.micro_batches and not plan.forward_only:
            gradients = expected.gradients_of_everything()
            for stage in range(rank, virtual, world_size):
                torch.testing.assert_close(model.weights[stage].grad, gradients[stage], rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()
    return len(seeds)


@pytest.mark.parametrize("stages", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_verified_plans_run_and_give_the_right_gradients(stages):
    seeds = [1000 * stages + i for i in range(PLANS_PER_PIPELINE)]
    assert run_ranks(run_plans, stages, {"seeds": seeds}, deadline_s=200) == [PLANS_PER_PIPELINE] * stages
