"""What the ranks of the layout tests run: a layout's model stepped by `MegatronPipeline`, and the plain reference."""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import torch  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron_dynapipe.errors import DynaPipeError  # noqa: E402
from megatron_dynapipe.integration.entry.megatron_pipeline import MegatronPipeline, Tokens, global_batch  # noqa: E402
from megatron_dynapipe.units import ModelFamily, Recompute  # noqa: E402
from tests.integration.layouts import Layout, as_layout, build, entries, planner, samples, start, t5_split  # noqa: E402
from tests.integration.tiny import gpt_losses, t5_losses  # noqa: E402

SEED = 11
assert Tokens() == Tokens(pad_id=0, bos_id=1, eos_id=2)  # those of tiny's reference


class Trainer:
    """One rank of a layout."""

    def __init__(self, layout: Layout, *, device: str = "cpu", backend: str = "gloo") -> None:
        self.layout = layout
        split = t5_split(layout)
        start(layout, split, backend)
        self.chunks = [chunk.to(device) for chunk in build(layout, split)]
        model_config = self.chunks[0].config
        if layout.dtype != "fp32":
            self.chunks = [Float16Module(model_config, chunk) for chunk in self.chunks]
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=layout.overlap,
            use_distributed_optimizer=layout.distributed_optimizer,
            grad_reduce_in_fp32=layout.dtype != "fp32",
            bucket_size=20_000,
        )
        self.models = [
            DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        scale = {} if layout.loss_scale is None else {"initial_loss_scale": layout.loss_scale, "hysteresis": 1}
        options = OptimizerConfig(
            optimizer="adam",
            lr=layout.learning_rate,
            weight_decay=0.0,
            clip_grad=1.0,
            fp16=layout.dtype == "fp16",
            bf16=layout.dtype == "bf16",
            params_dtype=layout.torch_dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
            **scale,
        )
        self.optimizer = get_megatron_optimizer(options, self.models)
        self.pipeline = MegatronPipeline(self.models, self.optimizer, planner(layout), seed=SEED)
        self.batch = samples(layout.samples)

    def gradients(self) -> tuple[float, list[tuple[str, list[int], list[int], torch.Tensor]]]:
        """Loss of one iteration, and per parameter (name, place, whole shape, gradient)."""
        for model in self.models:
            model.zero_grad_buffer()
            model.force_all_reduce = True
        result = self.pipeline.run(self.batch, force_all_reduce=True)
        self.pipeline.iteration -= 1
        found = []
        for model in self.models:
            model.force_all_reduce = False
            inner = model.module.module if self.layout.dtype != "fp32" else model.module
            for entry, parameter in entries(inner):
                gradient = (parameter.main_grad.float() / self.optimizer.get_loss_scale()).cpu()
                found.append((entry.key, list(entry.global_offset), list(entry.global_shape), gradient))
        return result.loss, found

    def weights(self) -> dict[str, torch.Tensor]:
        """Per chunk and parameter, under names of this rank."""
        return {
            f"{chunk}.{name}": parameter.detach().clone()
            for chunk, model in enumerate(self.chunks)
            for name, parameter in model.named_parameters()
        }


def train(rank: int, world_size: int, layout: dict, steps: int = 5, **where: str) -> dict[str, object]:
    """Loss and gradients of the first iteration, then losses and gradient norms of `steps` from the same start."""
    trainer = Trainer(as_layout(layout), **where)
    loss, gradients = trainer.gradients()
    results = [trainer.pipeline.step(trainer.batch) for _ in range(steps)]
    plan = trainer.pipeline.planner.plan(global_batch(trainer.batch, trainer.layout.kind, 0), 0)
    return {
        "loss": loss,
        "gradients": gradients,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "overflowed": [result.overflowed for result in results],
        "tokens": results[0].tokens if results else 0,
        "micro_batches": [len(replica.micro_batches) for replica in plan.replicas],
        "modes": [mb.recompute.value for replica in plan.replicas for mb in replica.micro_batches],
    }


def train_one_by_one(rank: int, world_size: int, layout: dict, steps: int = 5) -> dict[str, object]:
    """The reference: one process, samples one at a time, unpadded, plain autograd and PyTorch's Adam."""
    wanted = as_layout(layout)
    alone = Layout(
        family=wanted.family,
        positions=wanted.positions,
        tied=wanted.tied,
        depth=wanted.depth,
        samples=wanted.samples,
        attention="megatron" if wanted.positions != "relative" else "sdpa",  # theirs has no relative positions
    )
    split = t5_split(alone)
    start(alone, split)
    model = build(alone, split)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=alone.learning_rate)
    losses, norms, first = [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, tokens = _backward_all(model, alone)
        for parameter in model.parameters():
            parameter.grad /= tokens
        if not first:
            first = [(e.key, list(e.global_offset), list(e.global_shape), p.grad.clone()) for e, p in entries(model)]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss / tokens)
    return {"loss": losses[0], "gradients": first, "losses": losses, "norms": norms, "tokens": tokens}


def _backward_all(model: torch.nn.Module, layout: Layout) -> tuple[float, int]:
    total, tokens = 0.0, 0
    for parts in samples(layout.samples):
        given, wanted = (torch.tensor(part)[None] for part in parts)
        losses = (t5_losses if layout.kind is ModelFamily.T5 else gpt_losses)(model, given, wanted)
        losses.sum().backward()
        total, tokens = total + losses.sum().item(), tokens + losses.numel()
    return total, tokens


def replay(rank: int, world_size: int, layout: dict, modes: list[list[str]]) -> list[dict[str, object]]:
    """Loss and gradients of one iteration, run once for each list of modes of recomputation, from the same state."""
    trainer = Trainer(as_layout(layout))
    results = []
    for wanted in modes:
        trainer.pipeline.planner.modes = tuple(map(Recompute, wanted))
        loss, gradients = trainer.gradients()
        results.append({"loss": loss, "gradients": gradients})
    trainer.pipeline.iteration += 1
    loss, gradients = trainer.gradients()
    results.append({"loss": loss, "gradients": gradients})
    return results


def overflow(rank: int, world_size: int, layout: dict, poisoned: int) -> dict[str, object]:
    """One rank's gradients become infinite: whether each rank updated, and its weights before and after."""
    trainer = Trainer(as_layout(layout))
    before = trainer.weights()
    trainer.gradients()
    if rank == poisoned:
        next(trainer.models[0].parameters()).main_grad[..., 0] = torch.inf
    updated, _, _ = trainer.optimizer.step()
    unchanged = all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())
    scale = float(trainer.optimizer.get_loss_scale())
    after = trainer.pipeline.step(trainer.batch)
    return {
        "updated": updated,
        "unchanged": unchanged,
        "scale": scale,
        "overflowed_next": after.overflowed,
        "changed_next": any(not torch.equal(before[name], weight) for name, weight in trainer.weights().items()),
    }


def evaluate(rank: int, world_size: int, layout: dict) -> dict[str, object]:
    trainer = Trainer(as_layout(layout))
    losses = [trainer.pipeline.evaluate(trainer.batch).loss for _ in range(2)]
    buffers = [parameter.main_grad for model in trainer.models for parameter in model.parameters()]
    return {
        "first": losses[0],
        "second": losses[1],
        "training": all(model.training for model in trainer.models),
        "untouched": trainer.pipeline.iteration == 0 and not any(buffer.any() for buffer in buffers),
    }


def planned_before(rank: int, world_size: int, layout: dict) -> dict[str, object]:
    """A batch run by a plan made before, and by one made in the step."""
    trainer = Trainer(as_layout(layout))
    plan = trainer.pipeline.plan(trainer.batch)
    given = trainer.pipeline.run(trainer.batch, plan)
    trainer.pipeline.iteration = 0
    made = trainer.pipeline.run(trainer.batch)
    passes = [event.instruction for event in given.trace.events()]
    return {
        "same_plan": given.plan is plan and made.plan == plan,
        "losses": (given.loss, made.loss),
        "ran_the_list": passes == list(plan.replicas[0].stages[rank].instructions),
    }


def refused(rank: int, world_size: int, wanted: str) -> str:
    """What a pipeline says of something that it cannot run."""
    trainer = Trainer(Layout())
    models, plans, batch = trainer.models, planner(Layout()), trainer.batch
    if wanted == "layout":
        plans = planner(Layout(stages=2))
    if wanted == "loss":
        models[0].config.calculate_per_token_loss = False
    if wanted == "modules":
        models[0].config.recompute_modules = ["core_attn", "layernorm"]
    try:
        MegatronPipeline(models, None if wanted == "optimizer" else trainer.optimizer, plans).step(
            [] if wanted == "batch" else batch
        )
    except DynaPipeError as error:
        return str(error)
    return "nothing"
