"""What ranks of a test run: a divided model beside the whole one, step by step."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynapipe.modules import Pipeline, split_model
from tests.modules.models import CASES, Batch, build

SIZES = ((4, 8), (5, 12), (3, 6), (7, 10), (2, 9))
"""(samples per replica, length) of five steps: odd ones, and another length each time."""


def shares(batch: Batch, replicas: int) -> list[Batch]:
    """A batch over replicas, the first with a sample more where it does not divide."""
    pieces = {key: value.tensor_split(replicas) for key, value in batch.items()}
    return [{key: pieces[key][replica] for key in batch} for replica in range(replicas)]


def reference_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Any, batch: Batch) -> float:
    """One step of the whole model on the whole batch."""
    known = inspect.signature(model.forward).parameters
    arguments = {name: value for name, value in batch.items() if name != "labels" or name in known}
    optimizer.zero_grad()
    total, count = case.loss(model(**arguments), batch)
    loss = total / count
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    rank: int, world_size: int, *, name: str, replicas: int, sizes: Sequence[tuple[int, int]] = SIZES, **settings: Any
) -> dict[str, Any]:
    """Five steps in pieces and whole; the losses, and how far gradients and weights of this rank's part are apart."""
    dist.init_process_group("gloo")
    case, generator = CASES[name], torch.Generator().manual_seed(3)
    model, whole = build(name), build(name)
    stages = world_size // replicas
    points = settings.pop("split_points", case.points_of(stages))
    part = split_model(model, case.batch(4, 8, generator), split_points=points, replicas=replicas)
    pipeline = Pipeline(part, torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9), case.loss, **settings)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    weights = dict(whole.named_parameters(remove_duplicate=False))
    results: dict[str, Any] = {"losses": [], "expected": [], "gradients": 0.0, "weights": 0.0}
    for size, length in sizes:
        batch = case.batch(size * replicas, length, generator)
        loss, overflow = pipeline.step(shares(batch, replicas)[part.replica])
        assert not overflow
        results["losses"].append(loss.item())
        results["expected"].append(reference_step(whole, optimizer, case, batch))
        for key, parameter in part.named_parameters():
            ours, theirs = parameter.grad, weights[key].grad
            assert (ours is None) == (theirs is None), key
            if ours is not None and theirs is not None:
                results["gradients"] = max(results["gradients"], (ours - theirs).abs().max().item())
            results["weights"] = max(results["weights"], (parameter - weights[key]).abs().max().item())
    results["names"] = [key for key, _ in part.named_parameters(remove_duplicate=False)]
    return results
