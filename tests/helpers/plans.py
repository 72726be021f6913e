"""Pipelines and plans for tests, from a seed: random costs, real orders, real lowering."""

import random
from typing import Any

import numpy as np

from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Pass
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.model import boundary_shapes, boundary_tensors
from megatron_dynapipe.core.native import PassOrder
from megatron_dynapipe.core.orders import SCHEDULES
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan, StagePlan, Totals
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.costing import PipelineLayout, model_of_layers
from megatron_dynapipe.store.entry import StageEntry
from tests.helpers.lists import micro_batch, packed_shape

NO_LIMIT = 10**9


def random_problem(
    micro_batches: int,
    stages: int,
    *,
    chunks: int = 1,
    forward_only: bool = False,
    seed: int = 0,
    memory_limit_bytes: int = NO_LIMIT,
    peak_covers_backward: bool = False,
    message_bytes: int = 0,
) -> ScheduleProblem:
    """Uneven costs; ten bytes of model state, one to nine stored per micro-batch and stage, two more at the peak.

    At a peak that covers the backward it is none to two more. Messages have at most so many bytes.
    """
    random = np.random.default_rng(seed)
    shape = (micro_batches, stages * chunks)
    stored = random.integers(1, 10, shape)
    forward_transfer, backward_transfer = random.integers(0, 4, shape), random.integers(0, 4, shape)
    forward_transfer[:, -1] = backward_transfer[:, 0] = 0
    weight = random.integers(0, 7, shape)
    forward_message, backward_message = (random.integers(0, message_bytes + 1, shape) for _ in range(2))
    forward_message[:, -1] = backward_message[:, 0] = 0
    return ScheduleProblem(
        stages=stages,
        chunks=chunks,
        forward_ns=random.integers(5, 20, shape),
        backward_ns=random.integers(10, 40, shape),
        forward_message_bytes=forward_message,
        backward_message_bytes=backward_message,
        stored_bytes=stored,
        peak_bytes=stored + (random.integers(0, 3, shape) if peak_covers_backward else 2),
        forward_transfer_ns=forward_transfer,
        backward_transfer_ns=backward_transfer,
        model_state_bytes=np.full(stages, 10, np.int64),
        memory_limit_bytes=memory_limit_bytes,
        weight_ns=weight,
        forward_only=forward_only,
        peak_covers_backward=peak_covers_backward,
    )


def divided(order: PassOrder, seed: int) -> PassOrder:
    """The order with about half of its backward passes in halves, the second ones at later places."""
    choose, lists = random.Random(seed), []
    for passes in order:
        steps: list[Pass] = list(passes)
        for step in passes:
            if isinstance(step, Backward) and choose.random() < 0.5:
                at = steps.index(step)
                steps[at] = BackwardInput(step.micro_batch, step.chunk)
                steps.insert(choose.randint(at + 1, len(steps)), BackwardWeight(step.micro_batch, step.chunk))
        lists.append(tuple(steps))
    return tuple(lists)


def layout_of(family: ModelFamily, virtual_stages: int, *, encoder_layers: int | None = None) -> PipelineLayout:
    """A layer to a virtual stage (two to a single one); half of a T5's are in the encoder, unless said otherwise."""
    layers = max(virtual_stages, 2)
    decoder = layers - (encoder_layers or layers // 2) if family is ModelFamily.T5 else 0
    return PipelineLayout.equal(model_of_layers(family, layers - decoder, decoder), virtual_stages)


def make_plan(
    micro_batches: tuple[int, ...] = (3,),
    stages: int = 2,
    *,
    chunks: int = 1,
    family: ModelFamily = ModelFamily.GPT,
    forward_only: bool = False,
    method: str = "1f1b",
    seed: int = 0,
    layouts: tuple[BatchLayout, ...] = (BatchLayout.PADDED,),
    halves: bool = False,
    receive_ahead: int | None = None,
) -> IterationPlan:
    """A valid plan; one number of micro-batches per replica. Micro-batch i has two samples of up to 16 + 8 i tokens.

    The layouts are given to the micro-batches in turn. With `halves` some backward passes are divided.
    """
    tensors = boundary_tensors(layout_of(family, stages * chunks))
    replicas = []
    sample = 0
    for replica, count in enumerate(micro_batches):
        problem = random_problem(count, stages, chunks=chunks, forward_only=forward_only, seed=seed + replica)
        order = SCHEDULES[method](problem)
        order = divided(order, seed) if halves else order
        run = simulate(problem, order)
        batches = _micro_batches(problem, family, layouts, first_sample=sample)
        sample += 2 * count
        topology = PipelineTopology(
            stages=stages,
            chunks=chunks,
            shapes=boundary_shapes(tensors, [batch.shape for batch in batches], hidden_size=4),
            forward_only=forward_only,
            receive_ahead=receive_ahead,
        )
        stage_plans = tuple(
            StagePlan(stage=stage, instructions=instructions, predicted=run.timeline[stage])
            for stage, instructions in enumerate(lower(order, topology))
        )
        replicas.append(ReplicaPlan(micro_batches=tuple(batches), stages=stage_plans, predicted_ns=run.makespan_ns))
    return IterationPlan(
        iteration=7,
        family=family,
        forward_only=forward_only,
        settings_digest="5e77",
        pipeline_stages=stages,
        chunks=chunks,
        memory_limit_bytes=NO_LIMIT,
        model_state_bytes=(10,) * stages,
        peak_covers_backward=False,
        batch_layouts=tuple(dict.fromkeys(layouts)),
        replicas=tuple(replicas),
    )


def _micro_batches(
    problem: ScheduleProblem, family: ModelFamily, layouts: tuple[BatchLayout, ...], *, first_sample: int
) -> list[MicroBatch]:
    """Two samples to each; the costs are the problem's."""
    t5 = family is ModelFamily.T5
    batches = []
    for row in range(problem.micro_batches):
        layout, sample = layouts[row % len(layouts)], first_sample + 2 * row
        lengths = (10, 16 + 8 * row), (3, 6) if t5 else (0, 0)
        padded = Shape(2, 16 + 8 * row, 8 if t5 else 0)
        shape = packed_shape(family, *lengths) if layout is BatchLayout.PACKED else padded
        costs = {kind: tuple(getattr(problem, kind)[row].tolist()) for kind in ("stored_bytes", "peak_bytes")}
        batches.append(micro_batch(shape, *lengths, layout=layout, sample_ids=(sample, sample + 1), **costs))
    return batches


def stage_entry(iteration: int, *micro_batches: MicroBatch, stage: int = 0, **changes: Any) -> StageEntry:
    """The share of a rank that runs nothing but has these micro-batches, in a T5 run of one stage."""
    fields = {
        "replica": 0,
        "family": ModelFamily.T5,
        "forward_only": False,
        "plan_digest": "digest",
        "pipeline_stages": 1,
        "chunks": 1,
        "stage_plan": StagePlan(stage=stage, instructions=(), predicted=()),
        "totals": Totals(
            samples=0, real_tokens=0, padded_positions=0, micro_batches=(len(micro_batches),), predicted_ns=0
        ),
    }
    return StageEntry(iteration=iteration, micro_batches=micro_batches, **(fields | changes))
