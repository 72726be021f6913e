"""Planned passes in a training loop of your own: a small policy gradient, with log-probabilities before each update.

    torchrun --nproc-per-node 2 examples/policy_loop.py

The loop is as reinforcement-learning trainers on megatron-core have one: it makes its own rows of samples, calls a
schedule function with its own step function, and puts results back by indices. Samples that count upwards are rewarded.
"""

# isort: off
from gpt_steps import HEADS, HIDDEN, LONGEST, ON_CPU, VOCABULARY, build_model  # enables the CPU before Megatron comes

# isort: on
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model

from megatron_dynapipe import planned
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import A100_RATES, CPU_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.tools.loop import Plans

SAMPLES = 16
DATA = ("advantages", "old")


def draw(generator: torch.Generator) -> tuple[list[torch.Tensor], list[float]]:
    """Samples, short and long, and their advantages: every second one counts upwards, the others downwards."""
    samples = []
    for number, length in enumerate(torch.randint(8, LONGEST, (SAMPLES,), generator=generator).tolist()):
        upwards = torch.arange(length + 1) + torch.randint(3, VOCABULARY - LONGEST - 1, (1,), generator=generator)
        samples.append(upwards if number % 2 == 0 else upwards.flip(0))
    return samples, [1.0, -1.0] * (SAMPLES // 2)


def row_of(samples: Sequence[torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Samples one after another in a row, in which they do not see each other."""
    lengths = [len(sample) - 1 for sample in samples]
    own = torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths))
    mask = (own[:, None] != own) | torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
    return {
        "tokens": torch.cat([sample[:-1] for sample in samples])[None].to(device),
        "labels": torch.cat([sample[1:] for sample in samples])[None].to(device),
        "positions": torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        "mask": mask[None, None].to(device),
        "lengths": lengths,
    }


def step(rows: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[Any, Any]:
    """The loop's own step function: a row through this stage; on the last one, log-probabilities of its samples."""
    row = next(rows)
    output = model(row["tokens"], row["positions"], row["mask"])
    if unwrap_model(model).post_process:
        output = -torch.nn.functional.cross_entropy(output[0].float(), row["labels"][0], reduction="none")
    return output, partial(loss_of, row)


def loss_of(row: dict[str, Any], log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The sum of the losses of a row's tokens, their number, and the log-probabilities of each sample."""
    parts = log_probs.split(row["lengths"])
    loss = torch.zeros((), device=log_probs.device)
    for part, advantage, old in zip(parts, row["advantages"], row["old"], strict=False):
        loss = loss - advantage * (part - old).exp().clamp(max=1.2).sum()
    tokens = torch.tensor(len(log_probs), dtype=torch.int, device=log_probs.device)
    return loss, tokens, [part.detach() for part in parts]


def run(
    plans: Plans, model: torch.nn.Module, samples: Sequence[torch.Tensor], **data: Sequence[Any]
) -> list[torch.Tensor]:
    """One call of the schedule function, an update where there is `data` of each sample.

    Returns:
        On the last stage, log-probabilities of each sample, at its place.
    """
    is_update = bool(data)
    micro_batches = plans.micro_batches([len(sample) - 1 for sample in samples], forward_only=not is_update)
    device = next(model.parameters()).device
    rows = []
    for places in micro_batches:
        chosen = {name: [data[name][place] for place in places] if data.get(name) else [] for name in DATA}
        rows.append(row_of([samples[place] for place in places], device) | chosen)
    reports = plans.forward_backward(
        forward_step_func=step,
        data_iterator=iter(rows),
        model=[model],
        num_microbatches=len(rows),
        forward_only=not is_update,
    )
    of_place = {
        place: log_probs
        for places, report in zip(micro_batches, reports, strict=bool(reports))
        for place, log_probs in zip(places, report, strict=True)
    }
    return [of_place[place] for place in sorted(of_place)]


def main() -> list[float]:
    """Update twelve times; on the last stage, by how much log-probabilities of rewarded samples exceed the others'."""
    device = torch.device("cpu") if ON_CPU else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if ON_CPU else "nccl")
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=torch.distributed.get_world_size())
        model_parallel_cuda_manual_seed(1)
        model = build_model(device)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
        model.config.finalize_model_grads_func = finalize_model_grads
        sizes = {"hidden": HIDDEN, "heads": HEADS, "kv_channels": HIDDEN // HEADS, "ffn": 4 * HIDDEN}
        shape = ModelShape(family=ModelFamily.GPT, vocabulary=VOCABULARY, **sizes)
        costs = AnalyticCostModel(shape, CPU_RATES if ON_CPU else A100_RATES, max_length=SAMPLES * LONGEST)
        with planned([model], costs, memory_mb=40) as plans:
            return train(model, optimizer, plans)
    finally:
        torch.distributed.destroy_process_group()


def train(model: torch.nn.Module, optimizer: Any, plans: Plans) -> list[float]:
    """The loop: log-probabilities of the policy as it is, then an update by them."""
    generator, gains = torch.Generator().manual_seed(0), []
    for number in range(12):
        samples, advantages = draw(generator)
        old = run(plans, model, samples)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(plans, model, samples, advantages=advantages, old=old)
        optimizer.step()
        if old:
            means = [float(log_probs.mean()) for log_probs in old]
            gains.append((sum(means[::2]) - sum(means[1::2])) / len(means) * 2)
            print(f"update {number}: log-probabilities differ by {gains[-1]:.3f}", flush=True)
    return gains


if __name__ == "__main__":
    main()
