"""One rank of the accuracy benchmark: planned iterations, each beside a repeat of one and the same iteration.

    torchrun --nproc-per-node 2 -m benchmarks.cost_accuracy.iterations --model t5 --cost-model FILE -- FLAGS

The last line of standard output is a JSON object of figures.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_dynapipe import config, cpu
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.memory import high_water_marks, message_elements
from megatron_dynapipe.core.plan import BACKWARD, FORWARD, time_by_kind
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.memory import LiveStorages
from megatron_dynapipe.service.planned_splits import split_sampler

cpu.quieten()

BOUND, SPREADS = 0.10, 1.5
"""The mean error that is aimed at: the larger of this and so many times the spread of repeats."""


def main() -> None:
    """Run all phases; rank 0 prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("t5", "gpt"), required=True)
    parser.add_argument("--cost-model", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="fewer iterations where these would take longer")
    parser.add_argument("--vocabulary", type=int, help="tokens, where no dataset is given")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    flags = config.expand(args.flags[1:] if args.flags[:1] == ["--"] else args.flags)
    cpu.enable(config.early_flags(flags).dynapipe_device)
    from megatron_dynapipe.megatron.profiling.setup import prepared

    flags += ["--dynapipe-cost-model", str(args.cost_model)]
    family, stages = ModelFamily(args.model), int(os.environ["WORLD_SIZE"])
    with prepared(flags, family, pipeline_parallel=stages, vocabulary=args.vocabulary) as setup:
        bench = Bench(setup)
        bench.measure(args.warm_up, until=None)
        end = time.monotonic() + args.minutes * 60
        figures: dict[str, Any] = {"as profiled": bench.measure(args.iterations, until=end)}
        figures["stages"] = bench.stages()
        figures["memory"] = bench.memory()
        if bench.rank == 0:
            print(json.dumps(figures), flush=True)


class Bench:
    """Iterations of a run's model through its pipeline, timed by the executor's own trace."""

    def __init__(self, setup: Any) -> None:
        from megatron.core import parallel_state

        from benchmarks.throughput.model import build
        from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline

        inputs = _plan_inputs(setup)
        models, optimizer = build(setup)
        self._base = planner_of(inputs.planner, inputs.costs.load())
        self._pipeline = MegatronPipeline(models, optimizer, self._base, seed=setup.args.seed)
        self._sampler = split_sampler(Path(inputs.data_folder), inputs.splits[0])
        self._control = ControlGroup(timeout_s=300)
        self.rank, self._stage = self._control.rank, parallel_state.get_pipeline_model_parallel_rank()
        self._device, self._vocabulary = setup.device, setup.args.vocab_size
        self._next = 1
        self._sums = np.zeros((2, 2))  # predicted and measured ns of this stage's forwards and backwards

    def measure(self, iterations: int, *, until: float | None) -> dict[str, Any]:
        """Iterations of new batches, each followed by one of batch 0: errors of prediction, spread of the repeats."""
        errors: list[float] = []
        pairs: list[tuple[float, float]] = []
        repeats: list[float] = []
        while len(errors) < iterations and (not errors or until is None or self._agreed(time.monotonic() < until)):
            predicted, measured = self._step(self._next)
            self._next += 1
            errors.append(predicted / measured - 1)
            pairs.append((round(predicted, 4), round(measured, 4)))
            repeats.append(self._step(0)[1])
        spread = float(np.abs(np.array(repeats) / np.mean(repeats) - 1).mean())
        error = float(np.abs(errors).mean())
        return {
            "iterations": len(errors),
            "mean_error": error,
            "median_error": float(np.median(np.abs(errors))),
            "bias": float(np.mean(errors)),
            "repeat_spread": spread,
            "repeat_largest_over_smallest": float(np.max(repeats) / np.min(repeats)),
            "aim": max(BOUND, SPREADS * spread),
            "reached": error <= max(BOUND, SPREADS * spread),
            "pairs": pairs,
        }

    def stages(self) -> list[dict[str, float]]:
        """Predicted over measured time of all passes so far on every stage, forward and backward."""
        gathered = self._control.gather(torch.tensor(self._sums))
        ratios = [(of[0] / of[1]).tolist() for of in gathered]
        return [{"forward": round(forward, 3), "backward": round(backward, 3)} for forward, backward in ratios]

    def memory(self) -> dict[str, list[float]]:
        """Peak of one iteration on every stage in MB: activations and messages under way as planned, all as counted."""
        samples = self._samples(0)
        plan = self._pipeline.plan(samples)
        activations, messages = _planned(plan, self._stage, self._base.settings.element_bytes)
        counted = _counted(lambda: self._pipeline.run(samples, plan), self._device)
        columns = torch.stack(self._control.gather(torch.tensor([activations, messages, counted]))).T / 1e6
        return {
            "activations_mb": [round(mb, 2) for mb in columns[0].tolist()],
            "messages_mb": [round(mb, 2) for mb in columns[1].tolist()],
            "counted_mb": [round(mb, 2) for mb in columns[2].tolist()],
            "error_of_activations": [round(ratio, 4) for ratio in (columns[0] / columns[2] - 1).tolist()],
            "error_of_both": [round(ratio, 4) for ratio in ((columns[0] + columns[1]) / columns[2] - 1).tolist()],
        }

    def _step(self, batch: int) -> tuple[float, float]:
        """(predicted, measured) seconds of one iteration, as stage 0 sees it."""
        samples = self._samples(batch)
        plan = self._pipeline.plan(samples)
        dist.barrier()  # stages begin together, as they do after the reduction of an iteration
        events = self._pipeline.step(samples, plan).trace.events()
        if batch:
            planned = plan.replicas[0].stages[self._stage].predicted
            spent = [time_by_kind(times) for times in (planned, events)]
            self._sums += [[times[FORWARD], times[BACKWARD]] for times in spent]
        took = torch.tensor([events[-1].end_ns - events[0].start_ns])
        measured = int(self._control.gather(took)[0])
        return plan.totals.predicted_ns / 1e9, measured / 1e9

    def _agreed(self, mine: bool) -> bool:
        """Rank 0's answer on all ranks."""
        return bool(self._control.gather(torch.tensor([mine]))[0])

    def _samples(self, iteration: int) -> list[Any]:
        """Random tokens of a global batch's lengths."""
        batch = self._sampler.batch(iteration)
        draw = np.random.default_rng(iteration)
        return [
            (draw.integers(3, self._vocabulary, int(n)).tolist(), draw.integers(3, self._vocabulary, int(m)).tolist())
            for n, m in zip(batch.input_lengths, batch.target_lengths, strict=True)
        ]


def _plan_inputs(setup: Any) -> Any:
    """What the run's plans are made from."""
    from megatron_dynapipe.megatron.flags.from_megatron import run_config

    setup.args.train_iters, setup.args.eval_iters = 10**6, 0
    return run_config(setup.args, setup.family).inputs


def _planned(plan: Any, stage: int, element_bytes: int) -> tuple[int, int]:
    """Bytes of activations, without model state, and of messages, while the pass runs that needs most."""
    instructions = plan.replicas[0].stages[stage].instructions
    steps = [step for step, each in enumerate(instructions) if isinstance(each, Pass)]
    messages = [n * element_bytes for n in message_elements(instructions, forward_only=plan.forward_only)]
    highs = high_water_marks(plan, plan.replicas[0], stage, steps, messages)
    state = plan.model_state_bytes[stage]
    high, size = max(zip(highs, messages, strict=True), default=(state, 0))
    return high - size - state, size


def _counted(run: Callable[[], Any], device: Any) -> int:
    """The most bytes that a run holds above what was there before: by the allocator, on the CPU by hooks."""
    if device.type == "cpu":
        with LiveStorages() as live:
            run()
        return live.peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


if __name__ == "__main__":
    main()
