"""One rank of the wall-clock benchmark: planned iterations, each beside a repeat of one and the same iteration.

    torchrun --nproc-per-node 2 benchmarks/cost_accuracy/iterations.py --model t5 --cost-model FILE -- FLAGS

The last line of standard output is a JSON object of figures.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dynapipe import config, cpu

cpu.quieten()


def main() -> None:
    """Run both phases; rank 0 prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("t5", "gpt"), required=True)
    parser.add_argument("--cost-model", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--learned-iterations", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    flags = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    cpu.enable(config.value_of(flags, "dynapipe-device", "auto"))  # type: ignore[arg-type]
    from megatron_dynapipe.integration.profiling.setup import prepared
    from megatron_dynapipe.units import ModelFamily

    flags += ["--dynapipe-cost-model", str(args.cost_model)]
    stages = int(os.environ["WORLD_SIZE"])
    with prepared(flags, ModelFamily(args.model), pipeline_parallel=stages) as setup:
        bench = _bench(setup)
        bench.measure(args.warm_up)
        figures = {"as profiled": bench.measure(args.iterations)}
        if args.learned_iterations:
            bench.learn()
            figures["learned"] = bench.measure(args.learned_iterations)
        figures["memory"] = bench.memory()
        if bench.rank == 0:
            print(json.dumps(figures), flush=True)


def _bench(setup: Any) -> "Bench":
    """The run's model, planner and batches, on this rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    from megatron_dynapipe.integration.arguments import RunSettings
    from megatron_dynapipe.integration.inputs import plan_inputs
    from megatron_dynapipe.integration.models.providers import gpt_provider, t5_provider, t5_split
    from megatron_dynapipe.integration.pipeline import Pipeline
    from megatron_dynapipe.planning.planner import Planner
    from megatron_dynapipe.sampling import LengthTable, Sampler
    from megatron_dynapipe.units import ModelFamily

    run = setup.args
    run.iteration = run.consumed_valid_samples = run.eval_iters = 0
    run.train_iters = 10**6
    inputs = plan_inputs(run, RunSettings.from_args(run), setup.family, on_cpu=setup.device.type == "cpu")
    provide = t5_provider(run, t5_split(run)) if setup.family is ModelFamily.T5 else gpt_provider(run)
    module = provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    ).to(device=setup.device, dtype=run.params_dtype)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=run.accumulate_allreduce_grads_in_fp32)
    model = DistributedDataParallel(get_model_config(module), ddp, module)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0), [model])
    planner = Planner(inputs.planner, inputs.costs.load())
    pipeline = Pipeline([model], optimizer, planner, seed=run.seed)
    sampler = Sampler(LengthTable.read(Path(inputs.data_folder), "train"), inputs.splits[0].sampler)
    return Bench(pipeline, planner, sampler, vocabulary=run.vocab_size)


class Bench:
    """Iterations of a pipeline, timed by the executor's own trace."""

    def __init__(self, pipeline: Any, planner: Any, sampler: Any, *, vocabulary: int) -> None:
        import torch.distributed as dist

        self.rank = dist.get_rank()
        self._pipeline, self._base, self._planner, self._sampler = pipeline, planner, planner, sampler
        self._vocabulary = vocabulary
        self._next = 1
        self._passes: list[Any] = []
        self._trace: Any = None
        executor = pipeline._executor
        execute: Callable[[Any], Any] = executor.execute

        def traced(plan: Any) -> Any:
            dist.barrier()  # stages begin together, as they do after the reduction of an iteration
            self._trace = execute(plan)
            return self._trace

        executor.execute = traced

    def measure(self, iterations: int) -> dict[str, float]:
        """Iterations of new batches, each followed by one of batch 0: errors of prediction, spread of the repeats."""
        import numpy as np

        errors, signed, repeats = [], [], []
        for _ in range(iterations):
            predicted, measured = self._step(self._next)
            self._next += 1
            errors.append(abs(predicted / measured - 1))
            signed.append(predicted / measured - 1)
            repeats.append(self._step(0)[1])
        spread = np.abs(np.array(repeats) / np.mean(repeats) - 1)
        return {
            "iterations": iterations,
            "mean_error": float(np.mean(errors)),
            "median_error": float(np.median(errors)),
            "bias": float(np.mean(signed)),
            "repeat_spread": float(spread.mean()),
            "repeat_largest_over_smallest": float(np.max(repeats) / np.min(repeats)),
        }

    def learn(self) -> None:
        """Correct the cost model by all passes measured so far, of all ranks, and plan with it from here on."""
        import torch.distributed as dist

        from megatron_dynapipe.cost import TableCostModel
        from megatron_dynapipe.planning.planner import Planner
        from megatron_dynapipe.service.recalibration import corrected_file, decode_passes, encode_passes

        control = self._pipeline._control
        mine = encode_passes(self._passes).decode()
        texts = [control.broadcast_text(mine, source=rank) for rank in range(dist.get_world_size())]
        samples = [sample for text in texts for sample in decode_passes(text.encode())]
        data = corrected_file(self._base.settings, self._base.cost_model, samples, 1)
        self._planner = Planner(self._base.settings, TableCostModel.decode(data))
        self._pipeline._planner = self._planner

    def memory(self) -> dict[str, list[float]]:
        """Peak activations of one iteration on every stage, predicted and counted, in MB (CPU only)."""
        import torch

        from megatron_dynapipe.integration.profiling.memory import LiveStorages
        from megatron_dynapipe.plan.instructions import Backward, Forward

        executor = self._pipeline._executor
        if self._pipeline._device.type != "cpu":
            return {}
        traced, counts = executor.execute, []

        def counted(plan: Any) -> Any:
            with LiveStorages() as live:
                trace = traced(plan)
            counts.append(live.peak_bytes)
            return trace

        executor.execute = counted
        result = self._pipeline.step(self._samples(0))
        executor.execute = traced
        replica = result.plan.replicas[0]
        held = peak = 0
        for step in replica.stages[self.rank].instructions:
            if isinstance(step, Forward):
                micro_batch = replica.micro_batches[step.micro_batch]
                peak = max(peak, held + micro_batch.peak_bytes[self.rank])
                held += micro_batch.stored_bytes[self.rank]
            elif isinstance(step, Backward):
                held -= replica.micro_batches[step.micro_batch].stored_bytes[self.rank]
        gathered = self._pipeline._control.gather(torch.tensor([peak, counts[0]]))
        return {
            "predicted_mb": [round(int(values[0]) / 1e6, 2) for values in gathered],
            "counted_mb": [round(int(values[1]) / 1e6, 2) for values in gathered],
        }

    def _step(self, batch: int) -> tuple[float, float]:
        """(predicted, measured) seconds of one iteration, as stage 0 sees it."""
        import torch

        from megatron_dynapipe.integration.learning import measured_passes
        from megatron_dynapipe.plan.iteration import StageEntry

        result = self._pipeline.step(self._samples(batch))
        events = self._trace.events()
        if batch:
            entry = StageEntry.of(result.plan, 0, self._pipeline._stage, plan_digest="")
            self._passes += measured_passes(entry, events)
        took = torch.tensor([events[-1].end_ns - events[0].start_ns])
        measured = int(self._pipeline._control.gather(took)[0])
        return result.plan.totals.predicted_ns / 1e9, measured / 1e9

    def _samples(self, iteration: int) -> list[Any]:
        """Random tokens of a global batch's lengths."""
        import numpy as np

        batch = self._sampler.batch(iteration)
        draw = np.random.default_rng(iteration)
        return [
            (draw.integers(3, self._vocabulary, int(n)).tolist(), draw.integers(3, self._vocabulary, int(m)).tolist())
            for n, m in zip(batch.input_lengths, batch.target_lengths, strict=True)
        ]


if __name__ == "__main__":
    main()
