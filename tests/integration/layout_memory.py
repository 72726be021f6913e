"""What the ranks of the memory tests run: what is alive after iterations."""

import gc
import tracemalloc

import numpy as np
import torch

from tests.integration.layout_ranks import Trainer
from tests.integration.layouts import as_layout


def count_tensors(rank: int, world_size: int, layout: dict, iterations: int) -> dict[str, object]:
    """Live tensors, their bytes and Python's memory after a quarter of the iterations, and after each further one."""
    trainer = Trainer(as_layout(layout))
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
    return {"tensors": tensors, "bytes": held, "python_kb": python_kb, "shapes": len(seen)}


def held_graphs(rank: int, world_size: int, layout: dict) -> int:
    """How many tensors with a graph behind them an iteration leaves."""
    trainer = Trainer(as_layout(layout))
    trainer.pipeline.step(trainer.batch)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum(tensor.grad_fn is not None for tensor in tensors)
