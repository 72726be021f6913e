"""A method's pipeline on one rank: what the driver of the throughput benchmark asks, done.

Megatron is imported late: without a GPU, the CPU platform must be in force before.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.throughput.methods import ABLATIONS, METHODS, Spec
from benchmarks.throughput.model import build, weights_of_products
from benchmarks.throughput.rows import rows_of_2023
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.instructions import Pass
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.costing.devices import peak_flops
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.data.spans import LossOn, kept_pair
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.planned_splits import split_sampler

TIMEOUT_S = 1800.0
"""Of a wait for the driver, which may be starting the other jobs, and of a transfer."""


class Job:
    """A method's pipeline on this rank, and the batches that it runs."""

    def __init__(self, spec: Spec, setup: Any) -> None:
        from megatron_dynapipe.megatron.flags.from_megatron import run_config

        method = (METHODS | ABLATIONS)[spec.method]
        run = setup.args
        run.train_iters, run.eval_iters = 10**6, 0
        on_cpu = setup.device.type == "cpu"
        if spec.jobs_per_device > 1 and not on_cpu:
            divide_memory(setup, spec.jobs_per_device)
        meta = read_meta(run.dynapipe_data)
        self._loss_on = LossOn(run.dynapipe_loss or meta.loss)
        self._planned_for = self._loss_on if method.labels else LossOn.EVERYTHING
        run.dynapipe_loss = self._planned_for  # for the choice of a layer split, too
        self._setup, self._config = setup, run_config(run, setup.family)
        inputs = self._config.inputs
        longest = (run.seq_length, run.decoder_seq_length or 0)
        # A target's start and end tokens take positions, and a decoder-only row's last token none.
        self._row = (longest[0], longest[1] - 2) if longest[1] else (longest[0] + 1, 0)
        self._joins = method.joins
        folder = Path(inputs.data_folder)
        self.prepare(method.planner(inputs.planner, longest), inputs.costs, meta)
        self._sampler = split_sampler(folder, inputs.splits[0])
        self._reader = open_split(folder, "train", setup.family)
        self._control = ControlGroup(timeout_s=TIMEOUT_S)
        self.rank = self._control.rank

    def prepare(self, settings: Any, costs: Any, tokens: Any) -> None:
        """Build what trains."""
        from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline

        models, optimizer = build(self._setup)
        optimizer.step = self._timed_steps(optimizer.step)
        self.weights = weights_of_products(models, self._setup.args)
        planner = planner_of(settings, costs.load())
        seed = self._setup.args.seed
        self._pipeline = MegatronPipeline(models, optimizer, planner, tokens=tokens, loss_on=self._loss_on, seed=seed)

    def _timed_steps(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """The optimizer's step, whose time on the device is kept; it waits for the device anyway, for the norm."""

        def timed() -> Any:
            self._synchronise()
            began = time.perf_counter_ns()
            result = step()
            self._synchronise()
            self._optimizer_ns = time.perf_counter_ns() - began
            return result

        return timed

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
            from megatron_dynapipe.megatron.entry.kept_splits import chosen_layer_split

            return {"layers_per_stage": list(chosen_layer_split(self._config, halves=command["halves"]))}
        return self._run(int(command["batch"]))

    def _run(self, number: int) -> dict[str, Any]:
        """Train one global batch; the weights change, the batch does not."""
        from megatron_dynapipe.tools.megatron_pipeline import global_batch

        samples = self.samples(number)
        planning = time.thread_time_ns()  # the planner has one thread, and others may be on its core
        lengths = global_batch(samples, self._setup.family, number, loss_on=self._planned_for)
        plan = self._pipeline.planner.plan(lengths, number)
        planning = time.thread_time_ns() - planning
        result, figures = self.timed(lambda: self._pipeline.step(samples, plan))
        events = result.trace.events()
        busy = sum(e.end_ns - e.start_ns for e in events if isinstance(e.instruction, Pass))
        totals = plan.totals
        return figures | {
            "idle": [1 - each / (figures["ms"] * 1e6) for each in self.gathered(busy)],
            "real_tokens": totals.real_tokens,
            "positions": totals.padded_positions,
            "micro_batches": sum(totals.micro_batches),
            "predicted_ms": totals.predicted_ns / 1e6,
            "planning_ms": planning / 1e6,
            "optimizer_ms": max(self.gathered(self._optimizer_ns)) / 1e6,
            "loss": result.loss,
            "share_of_peak": self.share_of_peak(totals.real_tokens, figures["ms"]),
        }

    def timed[T](self, call: Callable[[], T]) -> tuple[T, dict[str, Any]]:
        """What a call gives on all ranks at once, its ms and the peak memory of every rank."""
        self._reset_peak()
        dist.barrier()
        self._synchronise()
        start = time.perf_counter_ns()
        result = call()
        self._synchronise()
        dist.barrier()
        elapsed = time.perf_counter_ns() - start
        return result, {
            "ms": max(self.gathered(elapsed)) / 1e6,
            "peaks_mb": [peak / 1e6 for peak in self.gathered(self._peak())],
        }

    def share_of_peak(self, tokens: int, ms: float) -> float | None:
        """6 operations for each weight and token over those that the devices could have done; None where that is not
        known, and of a T5, whose weights do not see all tokens."""
        on_gpu = self._setup.device.type == "cuda" and self._setup.layout is None
        peak = peak_flops(torch.cuda.get_device_name(self._setup.device)) if on_gpu else None
        replicas = self._setup.args.data_parallel_size
        weights = sum(self.gathered(self.weights)) / replicas
        return None if peak is None else 6 * weights * tokens / (ms / 1e3 * peak * dist.get_world_size())

    def gathered(self, value: int) -> list[int]:
        """A number of every rank."""
        return [int(each) for each in self._control.gather(torch.tensor([value]))]

    def samples(self, number: int) -> list[Any]:
        """A global batch's samples, as this method takes them."""
        batch = self._sampler.batch(number)
        planned = zip(batch.sample_ids, batch.input_lengths, batch.target_lengths, strict=True)
        whole = [
            kept_pair(self._sampler.cutter, int(sample), self._reader[int(sample)], (int(n), int(m)))
            for sample, n, m in planned
        ]
        return rows_of_2023(whole, self._row) if self._joins else whole

    def _synchronise(self) -> None:
        if self._setup.device.type == "cuda":
            torch.cuda.synchronize(self._setup.device)

    def _reset_peak(self) -> None:
        if self._setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._setup.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's own high-water mark, from now on

    def _peak(self) -> int:
        if self._setup.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._setup.device)
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


def divide_memory(setup: Any, jobs: int) -> None:
    """Give each of so many jobs on the same GPUs its part of the memory, unless the run says how much it may use."""
    from megatron_dynapipe.megatron.flags.machine import cluster_of, device_memory_bytes

    run = setup.args
    if run.dynapipe_device_memory_limit is None:
        whole = device_memory_bytes(cluster_of(run.dynapipe_cluster, device=setup.device), on_cpu=False)
        run.dynapipe_device_memory_limit = whole / jobs / BYTES_PER_MB
