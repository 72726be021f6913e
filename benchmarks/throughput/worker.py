"""One rank of one method of the throughput benchmark: runs global batches on command, and waits without computing.

    torchrun --nproc-per-node N benchmarks/throughput/worker.py SPEC.json

The driver (`run.py`) keeps a job of these per method and lets them take turns on the same batches. Rank 0 talks to it
over a socket in lines of JSON.
"""

import json
import os
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from methods import ABLATIONS, METHODS, Spec

from megatron_dynapipe import config, cpu

cpu.quieten()
TIMEOUT_S = 600.0


def main() -> None:
    """Run the commands of the driver until it closes the connection."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    cpu.enable(config.value_of(spec.flags, "dynapipe-device", "auto"))  # type: ignore[arg-type]
    from megatron_dynapipe.integration.profiling.setup import prepared
    from megatron_dynapipe.units import ModelFamily

    with prepared(
        spec.flags,
        ModelFamily(spec.model),
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        layers_per_stage=spec.layers_per_stage,
    ) as setup:
        job = Job(spec, setup)
        driver = socket.create_connection(("127.0.0.1", spec.port)).makefile("rw") if job.rank == 0 else None
        job.say(driver, {"method": spec.method, "rank": 0})
        while (command := job.hear(driver)) is not None:
            job.say(driver, job.answer(command))


class Job:
    """A method's pipeline on this rank, and the batches that it runs."""

    def __init__(self, spec: Spec, setup: Any) -> None:
        from megatron_dynapipe.data.meta import open_split, read_meta
        from megatron_dynapipe.integration.entry.megatron_pipeline import MegatronPipeline
        from megatron_dynapipe.integration.flags.arguments import RunSettings
        from megatron_dynapipe.integration.flags.plan_inputs import plan_inputs
        from megatron_dynapipe.planning.planner import Planner
        from megatron_dynapipe.runtime.control_group import ControlGroup
        from megatron_dynapipe.sampling import LengthTable, Sampler

        run = setup.args
        run.iteration = run.consumed_valid_samples = run.eval_iters = 0
        run.train_iters = 10**6
        self._setup, self._settings = setup, RunSettings.from_args(run)
        on_cpu = setup.device.type == "cpu"
        inputs = plan_inputs(run, self._settings, setup.family, on_cpu=on_cpu)
        longest = (run.seq_length, run.decoder_seq_length or 0)
        planner = Planner((METHODS | ABLATIONS)[spec.method].planner(inputs.planner, longest), inputs.costs.load())
        folder = Path(inputs.data_folder)
        model, optimizer = build(setup)
        self._pipeline = MegatronPipeline([model], optimizer, planner, tokens=read_meta(folder), seed=run.seed)
        self._sampler = Sampler(LengthTable.read(folder, "train"), inputs.splits[0].sampler)
        self._reader = open_split(folder, "train")
        self._control = ControlGroup(timeout_s=TIMEOUT_S)
        self.rank = self._control.rank

    def hear(self, driver: Any) -> dict[str, Any] | None:
        """The driver's next command, on all ranks; None once it has hung up."""
        text = self._control.broadcast_text(driver.readline() if driver is not None else "")
        return json.loads(text) if text.strip() else None

    def say(self, driver: Any, answer: dict[str, Any]) -> None:
        """Answer the driver, on rank 0."""
        if driver is not None:
            print(json.dumps(answer), file=driver, flush=True)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the driver asks: choose a layer split, or run a batch."""
        if command.get("split"):
            from megatron_dynapipe.integration.flags.plan_inputs import chosen_layer_split

            on_cpu = self._setup.device.type == "cpu"
            split = chosen_layer_split(self._setup.args, self._settings, self._setup.family, on_cpu=on_cpu)
            return {"layers_per_stage": list(split)}
        return self._run(int(command["batch"]))

    def _run(self, number: int) -> dict[str, Any]:
        """Train one global batch; the weights change, the batch does not."""
        import torch
        import torch.distributed as dist

        from megatron_dynapipe.plan.instructions import Backward, Forward

        samples = self._samples(number)
        plan = self._pipeline.plan(samples)
        self._reset_peak()
        dist.barrier()
        self._synchronise()
        start = time.perf_counter_ns()
        result = self._pipeline.step(samples, plan)
        self._synchronise()
        dist.barrier()
        elapsed = time.perf_counter_ns() - start
        events = result.trace.events()
        busy = sum(e.end_ns - e.start_ns for e in events if isinstance(e.instruction, Forward | Backward))
        mine = torch.tensor([elapsed, busy, self._peak()])
        by_rank = torch.stack(self._control.gather(mine))
        totals = plan.totals
        return {
            "ms": float(by_rank[:, 0].max()) / 1e6,
            "idle": [1 - float(each) / float(by_rank[:, 0].max()) for each in by_rank[:, 1]],
            "peak_mb": float(by_rank[:, 2].max()) / 1e6,
            "real_tokens": totals.real_tokens,
            "positions": totals.padded_positions,
            "micro_batches": sum(totals.micro_batches),
            "predicted_ms": totals.predicted_ns / 1e6,
            "loss": result.loss,
        }

    def _samples(self, number: int) -> list[Any]:
        batch = self._sampler.batch(number)
        pairs = [self._reader[int(sample)] for sample in batch.sample_ids]
        if batch.target_lengths.any():
            lengths = zip(batch.input_lengths, batch.target_lengths, strict=True)
            return [(given[:n], wanted[:m]) for (given, wanted), (n, m) in zip(pairs, lengths, strict=True)]
        return [joined(given, wanted, int(n)) for (given, wanted), n in zip(pairs, batch.input_lengths, strict=True)]

    def _synchronise(self) -> None:
        import torch

        if self._setup.device.type == "cuda":
            torch.cuda.synchronize(self._setup.device)

    def _reset_peak(self) -> None:
        import torch

        if self._setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._setup.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's own high-water mark, from now on

    def _peak(self) -> int:
        import torch

        if self._setup.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._setup.device)
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


def joined(given: Any, wanted: Any, tokens: int) -> tuple[Any, Any]:
    """A decoder-only sample's input and target, truncated to so many tokens together; the target keeps one."""
    kept = given[: tokens - 1]
    return kept, wanted[: tokens - len(kept)]


def build(setup: Any) -> tuple[Any, Any]:
    """The stage of this rank, wrapped by Megatron, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    from megatron_dynapipe.integration.models.providers import gpt_provider, t5_provider, t5_split
    from megatron_dynapipe.units import ModelFamily

    run = setup.args
    provide = t5_provider(run, t5_split(run)) if setup.family is ModelFamily.T5 else gpt_provider(run)
    module = provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    ).to(device=setup.device, dtype=run.params_dtype)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=run.accumulate_allreduce_grads_in_fp32)
    model = DistributedDataParallel(get_model_config(module), ddp, module)
    draw_weights(module)
    options = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, bf16=run.bf16, params_dtype=run.params_dtype)
    return model, get_megatron_optimizer(options, [model])


def draw_weights(module: Any) -> None:
    """Weights that depend on a parameter's place in the whole model alone, so that all layer splits start equal."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    parameters = dict(module.named_parameters())
    for name, entry in module.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
        if isinstance(entry, ShardedTensor) and name in parameters:
            generator = torch.Generator().manual_seed(zlib.crc32(entry.key.encode()))
            whole = torch.randn(entry.global_shape, generator=generator) * 0.02
            whole += "norm" in entry.key and "weight" in entry.key
            parameters[name].data.copy_(whole[entry.global_slice()])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
