"""What losses by task cost while training: milliseconds of an iteration on the last stage, and of a line of the log.

    python benchmarks/executor/task_losses.py --tasks 1000

Everything that is done for them alone is timed: tasks of positions, sums on the device, the reduction, the line, the
record. What TensorBoard or Weights & Biases take is not.
"""

import argparse
import time
from statistics import median

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megatron_dynapipe.integration.execution.step_functions import masked_loss
from megatron_dynapipe.integration.execution.task_losses import TaskLosses
from megatron_dynapipe.report.records import EvaluationRecord


def main() -> None:
    """Time iterations of some micro-batches, with tasks and without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--positions", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    draw = np.random.default_rng(0)
    mask, output = torch.ones(1, options.positions), torch.rand(1, options.positions)
    rows = [draw.integers(0, options.tasks, options.positions // 64).repeat(64) for _ in range(options.micro_batches)]
    names = [f"task {number}" for number in range(options.tasks)]
    spent: dict[str, list[float]] = {"iteration": [], "without tasks": [], "line": []}
    for _ in range(options.rounds):
        losses = TaskLosses(names, is_last=True)
        begin = time.perf_counter()
        for tasks in (None, rows):
            reports = [
                masked_loss(
                    mask, output, None if tasks is None else torch.from_numpy(row[None].copy()), int(row.max()) + 1
                )[2]
                for row in rows
            ]
            losses.add(reports)
            spent["without tasks" if tasks is None else "iteration"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
        losses.finish(dist.group.WORLD)
        text = "".join(f" {task}: {total / count:.6E} |" for task, (total, count) in losses.read(whole=True).items())
        record = EvaluationRecord(iteration=1, split="train", losses=losses.read(whole=False))
        assert len(text) and len(msgspec.json.encode(record))
        spent["line"].append(time.perf_counter() - begin)
    ms = {name: 1e3 * median(times) for name, times in spent.items()}
    print(f"an iteration: {ms['iteration'] - ms['without tasks']:.2f} ms, a line of the log: {ms['line']:.2f} ms")


if __name__ == "__main__":
    main()
