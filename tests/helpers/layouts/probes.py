"""What tests ask of a trainer besides training: replays, overflows, evaluation, refusals, what stays in memory."""

import contextlib
import gc
import sys
import tracemalloc
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP

from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout, Recompute
from megatron_dynapipe.tools.certify.records import Part
from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline, _longest, global_batch
from tests.helpers.layouts.layout import Layout
from tests.helpers.layouts.planning import planner
from tests.helpers.layouts.trainer import Trainer


def replay(layout: Layout, *, modes: list[list[str]]) -> list[dict[str, object]]:
    """Loss and gradients of one iteration, run once for each list of modes of recomputation, from the same state."""
    trainer = Trainer(layout)
    results = []
    for wanted in modes:
        trainer.pipeline.planner.modes = tuple(map(Recompute, wanted))
        loss, gradients = trainer.gradients()
        results.append({"loss": loss, "gradients": gradients})
    trainer.pipeline.iteration += 1
    loss, gradients = trainer.gradients()
    results.append({"loss": loss, "gradients": gradients})
    return results


def changed_targets(layout: Layout) -> list[tuple[float, list[Part]]]:
    """Loss and gradients of an iteration; with one bit of each target without a label changed; of one with a label."""
    trainer = Trainer(layout)
    results = [trainer.gradients()]
    unlabelled = [given for given, wanted in trainer.batch if not wanted]  # whose last token is a target alone
    labelled = [wanted for _, wanted in trainer.batch if wanted][:1]
    for tokens_of in (unlabelled, labelled):
        for tokens in tokens_of:
            tokens[-1] ^= 1
        results.append(trainer.gradients())
    return results


def overflow(layout: Layout) -> list[dict[str, object]]:
    """The gradients of each rank in turn become infinite: whether this rank updates, and its weights after it."""
    trainer = Trainer(layout)
    return [_overflow_on(poisoned, trainer) for poisoned in range(layout.ranks)]


def _overflow_on(poisoned: int, trainer: Trainer) -> dict[str, object]:
    before = trainer.weights()
    trainer.gradients()
    if dist.get_rank() == poisoned:
        next(trainer.models[0].parameters()).main_grad[..., 0] = torch.inf
    updated, _, _ = trainer.optimizer.step()
    unchanged = _equal(trainer.weights(), before)
    scale = float(trainer.optimizer.get_loss_scale())
    after = trainer.pipeline.step(trainer.batch)
    return {
        "updated": updated,
        "unchanged": unchanged,
        "scale": scale,
        "overflowed_next": after.overflowed,
        "changed_next": not _equal(trainer.weights(), before),
    }


def _equal(some: list[Part], others: list[Part]) -> bool:
    return all(torch.equal(one[3], other[3]) for one, other in zip(some, others, strict=True))


def evaluate(layout: Layout) -> dict[str, object]:
    trainer = Trainer(layout)
    losses = [trainer.pipeline.evaluate(trainer.batch).loss for _ in range(2)]
    buffers = [parameter.main_grad for model in trainer.models for parameter in model.parameters()]
    return {
        "first": losses[0],
        "second": losses[1],
        "training": all(model.training for model in trainer.models),
        "untouched": trainer.pipeline.iteration == 0 and not any(buffer.any() for buffer in buffers),
    }


def planned_before(layout: Layout) -> dict[str, object]:
    """A batch run by a plan made before, and by one made in the step."""
    trainer = Trainer(layout)
    plan = trainer.pipeline.plan(trainer.batch)
    given = trainer.pipeline.run(trainer.batch, plan)
    trainer.pipeline.iteration = 0
    made = trainer.pipeline.run(trainer.batch)
    passes = [event.instruction for event in given.trace.events()]
    return {
        "same_plan": given.plan is plan and made.plan == plan,
        "losses": (given.loss, made.loss),
        "ran_the_list": passes == list(plan.replicas[0].stages[dist.get_rank()].instructions),
    }


def train_one_replica(layout: Layout) -> list[float]:
    """Losses of three steps in which the first replica has all micro-batches, and the others have none."""
    trainer = Trainer(layout)
    busy = planner(replace(layout, replicas=1)).plan(global_batch(trainer.batch, layout.kind, 0), 0)
    stages = tuple(StagePlan(stage=stage, instructions=(), predicted=()) for stage in range(layout.stages))
    idle = msgspec.structs.replace(busy.replicas[0], micro_batches=(), stages=stages)
    plan = msgspec.structs.replace(busy, replicas=(*busy.replicas, *[idle] * (layout.replicas - 1)))
    return [trainer.pipeline.step(trainer.batch, plan).loss for _ in range(3)]


def warmed(layout: Layout, *, warm: bool) -> dict[str, object]:
    """Three steps, after a warm-up or not; the modes that the warm-up sets."""
    trainer = Trainer(layout)
    pipeline = trainer.pipeline
    modes: list[str] = []
    if warm:
        context = pipeline._runner.context(trainer.models)
        begin = context.begin
        context.begin = lambda iteration, index, mode: (modes.append(mode.value), begin(iteration, index, mode))
        warm_up(trainer, recompute=tuple(Recompute))
        context.begin = begin
        pipeline._runner.steps.warm_up = run_once()  # as on a GPU: the list alone, too
    losses = [pipeline.step(trainer.batch).loss for _ in range(3)]
    return {"losses": losses, "modes": modes, "weights": trainer.weights()}


def warm_up(trainer: Trainer, **settings: object) -> None:
    """What the first training step on a GPU does, under the planner's settings with some changed."""
    pipeline = trainer.pipeline
    pipeline._runner.settings = msgspec.structs.replace(pipeline.planner.settings, **settings)
    longest = _longest(pipeline.plan(trainer.batch))
    pipeline._runner.warm_up(trainer.models, pipeline._step_function, iteration=0, longest=longest)


def run_once() -> Callable[[Callable[[], None]], None]:
    """What warms a runner up, on any device."""
    left = [None]

    def warm_up(run: Callable[[], None]) -> None:
        if left:
            left.clear()
            run()

    return warm_up


def activations(layout: Layout) -> list[list[tuple[bool, list[int]]]]:
    """Whether gradients are wanted, and the shape, of every call of an activation: in the warm-up, and after it."""
    trainer = Trainer(layout)
    calls: list[tuple[bool, list[int]]] = []

    def activation(states: torch.Tensor) -> torch.Tensor:
        calls.append((torch.is_grad_enabled(), list(states.shape)))
        return torch.nn.functional.gelu(states)

    for module in (module for chunk in trainer.chunks for module in chunk.modules() if isinstance(module, MLP)):
        module.activation_func = activation
    warm_up(trainer, micro_batch_layouts=tuple(BatchLayout))
    warm = calls.copy()
    trainer.pipeline.step(trainer.batch)
    trainer.pipeline.evaluate(trainer.batch)
    return [warm, calls[len(warm) :]]


def refused(layout: Layout) -> dict[str, str]:
    """What a pipeline says of each thing that it cannot run."""
    trainer = Trainer(layout)
    config, given = trainer.models[0].config, {"optimizer": trainer.optimizer, "batch": trainer.batch}

    def said(*, plans: Planner | None = None, **changes: object) -> str:
        own = {name: changes.pop(name, value) for name, value in given.items()}
        try:
            with mock.patch.dict(vars(config), changes):
                MegatronPipeline(trainer.models, own["optimizer"], plans or planner(layout)).step(own["batch"])
        except DynaPipeError as error:
            return str(error)
        return "nothing"

    return {
        "layout": said(plans=planner(Layout(stages=2))),
        "loss": said(calculate_per_token_loss=False),
        "fp8": said(fp8="hybrid"),
        "modules": said(recompute_modules=["core_attn", "layernorm"]),
        "optimizer": said(optimizer=None),
        "batch": said(batch=[]),
    }


def count_tensors(layout: Layout, *, iterations: int, **where: str) -> dict[str, object]:
    """Live tensors, their bytes, Python's memory and the device's reserved one after each quarter of the iterations."""
    trainer = Trainer(layout, **where)
    reserved_mb: list[float] = []
    draw, seen = np.random.default_rng(3), set()
    tensors, held, python_kb = [], [], []
    for iteration in range(iterations):
        shortened = [(i[: draw.integers(1, len(i) + 1)], t) for i, t in trainer.batch[: draw.integers(3, 13)]]
        measures = (iteration + 1) % (iterations // 4) == 0
        plan = trainer.pipeline.step(trainer.batch if measures else shortened).plan
        seen |= {tuple(mb.shape) for replica in plan.replicas for mb in replica.micro_batches}
        if iteration == iterations // 8:
            tracemalloc.start()  # what is made before, by first uses, does not count
        if measures:
            del plan, shortened
            gc.collect()
            alive = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
            tensors.append(len(alive))
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in alive))
            del alive
            python_kb.append(tracemalloc.get_traced_memory()[0] // 1000)
            reserved_mb.append(torch.cuda.memory_reserved() / 1e6 if where.get("device") == "cuda" else 0.0)
    return {"tensors": tensors, "bytes": held, "python_kb": python_kb, "reserved_mb": reserved_mb, "shapes": len(seen)}


def held_graphs(layout: Layout) -> int:
    """How many tensors with a graph behind them an iteration leaves."""
    trainer = Trainer(layout)
    trainer.pipeline.step(trainer.batch)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum(tensor.grad_fn is not None for tensor in tensors)


def spans(layout: Layout) -> tuple[list[str], list[tuple[str, str, dict[str, int]]]]:
    """Of a step with nemo-lens: the span in which each pass of a layer runs, and all spans that begin."""
    begun: list[tuple[str, str, dict[str, int]]] = []
    opened, ran = ["none"], list[str]()

    @contextlib.contextmanager
    def managed_span(group: str, name: str, **attributes: int) -> Iterator[None]:
        begun.append((group, name, attributes))
        opened.append(name)
        yield
        opened.pop()

    names = ("nemo", "nemo.lens", "nemo.lens.helpers")
    modules = {name: types.ModuleType(name) for name in names}
    vars(modules[names[-1]])["managed_span"] = managed_span
    trainer = Trainer(layout)
    layer = next(module for module in trainer.chunks[0].modules() if isinstance(module, MLP))
    layer.register_forward_hook(lambda *_: ran.append(opened[-1]))
    layer.register_full_backward_hook(lambda *_: ran.append(opened[-1]))
    with mock.patch.dict(sys.modules, modules):
        trainer.pipeline.step(trainer.batch)
    return ran, begun
