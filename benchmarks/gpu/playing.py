"""One stage of a pipeline and its instruction list, as training runs them: by itself, or with the other stages.

By itself (`alone`) a process is told that it is one of many ranks. Its process groups are those of PyTorch that carry
nothing (`fake`), and so is its transport: what is sent goes nowhere, what is received is there at once, drawn at
random, since a GPU multiplies zeros faster. Everything between is training's own: layers, their wrapping, the step
runner with its executor, the passes. With others,

    torchrun --nproc-per-node STAGES -m benchmarks.gpu.playing PLANNED.json OUTPUT --turns N

the same runs in as many processes over real links, whose time is written: what `stages.py` composes is held against it.
"""

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import fake_pg as _registered  # noqa: F401

from benchmarks.gpu.composed import least, times_of
from benchmarks.gpu.planned import Case, Planned
from megatron_dynapipe import config, cpu
from megatron_dynapipe.core.instructions import Channel, Pass
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import ModelFamily, Shape
from megatron_dynapipe.data.collate import Collator
from megatron_dynapipe.runtime import StepRunner, rank, step_runner
from megatron_dynapipe.runtime.transport import JoinedWork, Work
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.store.entry import StageEntry

DEADLINE_S = 120.0
"""Of a transfer."""


class AtOnce:
    """A transport that sends nothing, and whose receives have arrived."""

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Nothing is sent."""
        return JoinedWork([])

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """States of normalised layers have arrived."""
        for tensor in tensors:
            tensor.normal_()
        return JoinedWork([])


class Stage:
    """One rank's stage of a planned iteration, built, and its micro-batches collated."""

    def __init__(self, setup: Any, planned: Planned, stage: int, steps: StepRunner) -> None:
        from megatron_dynapipe.megatron.execution.iterations import IterationRunner
        from megatron_dynapipe.megatron.execution.step_functions import (
            batch_maker,
            gpt_step,
            required_fields,
            t5_step,
        )
        from megatron_dynapipe.tools.megatron_pipeline import Tokens, reader_of

        case, plan = planned.case, planned.load()
        self._device, self._steps = setup.device, steps
        self._models = _built(setup, planned)
        self.own_bytes = self._allocated()
        self._entry = StageEntry.of(plan, 0, stage, plan_digest=digest(plan))
        self._step = gpt_step if case.family is ModelFamily.GPT else t5_step
        required = required_fields(self._models)
        reader = reader_of(_samples(case)) if required.text else None
        collate = Collator(required=required, reader=reader, special=Tokens())
        self._hosts = [
            collate(index, micro_batch, case.family) for index, micro_batch in enumerate(self._entry.micro_batches)
        ]
        shapes = [micro_batch.shape for micro_batch in self._entry.micro_batches]
        self._longest = Shape(1, max(s.input_length for s in shapes), max(s.target_length for s in shapes))
        make_batch = batch_maker(self._models)
        self._runner = IterationRunner(steps, planned.settings, required=required, make_batch=make_batch, seed=0)

    def turn(self) -> tuple[Event, ...]:
        """Run the list; when each instruction ran."""
        for model in self._models:
            model.zero_grad_buffer()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        totals, _, _ = self._runner.run(
            self._entry, self._hosts.__getitem__, self._models, self._step, longest=self._longest
        )
        return totals.trace.events()

    def peak_bytes(self) -> int | None:
        """The most that the last turn has allocated besides parameters and gradients; None where nobody counts."""
        if self._device.type == "cpu":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self.own_bytes

    def close(self) -> None:
        """Let go of the models, which a device holds one stage of at a time."""
        self._steps.close()
        del self._models, self._runner, self._steps, self._hosts
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _built(setup: Any, planned: Planned) -> list[Any]:
    """The (virtual) stages of this rank, with Megatron's own initial weights, wrapped by Megatron."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    from megatron_dynapipe.megatron.equip.built import built_stages

    layout, run = planned.settings.layout, setup.args
    models = []
    for chunk, stage in enumerate(built_stages(run, setup.family, layout)):
        module = stage.to(device=setup.device, dtype=setup.dtype)
        config = get_model_config(module)
        whole = Float16Module(config, module) if run.bf16 else module
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=run.accumulate_allreduce_grads_in_fp32)
        models.append(DistributedDataParallel(config, ddp, whole, disable_bucketing=chunk > 0))
    return models


def _samples(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random tokens of the batch's lengths; a GPT's sample is trained on all of its own."""
    draw = np.random.default_rng(0)
    inputs = case.batch["input"]
    targets = case.batch.get("target") or [1] * len(inputs)
    less = case.family is ModelFamily.GPT  # its lengths are of input and target together
    return [
        (draw.integers(3, case.vocabulary, n - less), draw.integers(3, case.vocabulary, m))
        for n, m in zip(inputs, targets, strict=True)
    ]


@contextlib.contextmanager
def prepared_stages(planned: Planned) -> Iterator[Any]:
    """Megatron's arguments and process groups of a planned case, over the ranks that there are, or seem to be."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training import global_vars

    from megatron_dynapipe.megatron.profiling.setup import prepared

    layout = planned.settings.layout
    with prepared(
        config.expand(planned.case.flags),
        planned.case.family,
        pipeline_parallel=layout.stages,
        layers_per_stage=layout.layers_per_stage,
        chunks=layout.chunks,
        vocabulary=planned.case.vocabulary,
    ) as setup:
        try:
            yield setup
        finally:
            global_vars.destroy_global_vars()  # the next stage has arguments of its own
            unset_num_microbatches_calculator()


@contextlib.contextmanager
def alone(planned: Planned, stage: int, *, is_warm: bool = False) -> Iterator[Stage]:
    """A stage of a plan in this process, which thinks that it is one rank of its pipeline.

    Unless `is_warm`, kernels are loaded as before training; where no receive is pending, a first turn does it as well.
    On a CPU its clock is the thread's processor time, so that what else the machine is busy with does not count.
    """
    from megatron_dynapipe.megatron.profiling.measure import clock_of

    stages = planned.settings.pipeline_parallel
    real = dist.init_process_group

    def carries_nothing(_backend: str, **_where: Any) -> None:
        real("fake", store=HashStore(), rank=stage, world_size=stages)

    ranks = {"RANK": str(stage), "WORLD_SIZE": str(stages), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with (
        mock.patch.dict(os.environ, ranks),
        mock.patch.object(dist, "init_process_group", carries_nothing),
        prepared_stages(planned) as setup,
    ):
        with mock.patch.object(rank, "platform_of", partial(clock_of, shared=False)):
            steps = step_runner(
                AtOnce(),
                setup.device,
                stage=stage,
                stages=stages,
                chunks=planned.settings.chunks,
                dtype=setup.dtype,
                deadline_s=DEADLINE_S,
            )
        steps.is_warm = is_warm
        with contextlib.closing(Stage(setup, planned, stage, steps)) as built:
            yield built


def together(planned: Planned, turns: int) -> dict[str, Any]:
    """Run all stages in the ranks that there are, each turn with a first one that does not count.

    Returns:
        What the iteration took, from its first pass to its last one's end, each turn, and the links. On a CPU also each
        stage's passes in the order of its list: the least ns of its thread's processor time.
    """
    from megatron_dynapipe.megatron.execution.transport import open_runner
    from megatron_dynapipe.megatron.profiling.measure import clock_of
    from megatron_dynapipe.runtime.control_group import ControlGroup
    from megatron_dynapipe.runtime.links import measure_links

    with prepared_stages(planned) as setup:
        control = ControlGroup(timeout_s=DEADLINE_S)
        links = measure_links(setup.device)
        dtype = setup.dtype
        opened = partial(open_runner, control, planned.settings, device=setup.device, dtype=dtype)
        steps = opened(timeout_s=DEADLINE_S, adds_up=False)
        spans = _spans(Stage(setup, planned, control.rank, steps), control, turns)
        steps.close()
        found = {"ms": [span / 1e6 for span in spans], "links": msgspec.to_builtins(links)}
        if setup.device.type == "cpu":
            with mock.patch.object(rank, "platform_of", partial(clock_of, shared=False)):
                steps = opened(timeout_s=DEADLINE_S, adds_up=False)
            stage = Stage(setup, planned, control.rank, steps)
            charged = least([times_of(stage.turn(), besides=True) for _ in range(turns)][1:])
            of_ranks = control.collect(json.dumps([*charged.values()]).encode())
            found["passes_ns"] = [json.loads(times) for times in of_ranks]
            steps.close()
        return found


def _spans(stage: Stage, control: Any, turns: int) -> list[int]:
    """ns of each turn but the first, over all ranks."""
    spans = []
    for _ in range(turns):
        dist.barrier()
        passes = [event for event in stage.turn() if isinstance(event.instruction, Pass)]
        ends = control.gather(torch.tensor([passes[0].start_ns, passes[-1].end_ns]))
        spans.append(int(max(end[1] for end in ends) - min(end[0] for end in ends)))
    return spans[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a planned iteration in the ranks of torchrun.")
    parser.add_argument("planned", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--turns", type=int, default=8, help="the first does not count (%(default)s)")
    options = parser.parse_args()
    planned = msgspec.json.decode(options.planned.read_bytes(), type=Planned)
    cpu.quieten()
    cpu.enable(planned.case.device)
    found = together(planned, options.turns)
    if os.environ["RANK"] == "0":
        options.output.write_text(json.dumps({"median_ms": median(found["ms"]), **found}))


if __name__ == "__main__":
    main()
