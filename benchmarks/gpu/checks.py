"""What is checked for being right, in the order of what decides most; README.md beside this file has the bounds."""

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.gpu.case import (
    COMPILERS,
    WORKER,
    Case,
    Check,
    Figures,
    environments,
    need_devices,
    need_engine,
    within,
)
from benchmarks.gpu.machine import NotRunError, ProcessFailedError, Ranks, run
from tests.helpers.layouts.compare import deviation
from tests.helpers.layouts.layout import named

EXACT = 1e-4
"""How far fp32 may be from one process with samples one by one, relative: the bound of docs/parallelism.md."""
BF16_ROUNDING = torch.finfo(torch.bfloat16).eps
LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")

PARTS = {
    "t5: packed rows, 2 stages on one device, bf16": "t5 1x2x1, packed",
    "gpt: packed rows, 2 stages on one device, bf16": "gpt 1x2x1, packed",
    "gpt: long samples in slices": "gpt 1x2x1, slices of 16",
    "t5: relative positions in packed rows, by flex_attention": "t5 1x2x1, relative positions, hidden 64, packed",
    "gpt: half layers, backward passes in halves": "gpt 1x2x1, layers 2.5+1.5, divided",
    "t5: half layers, the encoder's end inside a stage": "t5 1x2x1, layers 1.5+2.5",
}
"""Two stages on one device, in bf16."""
ENGINE = (
    "gpt 1x2x1, divided, Transformer Engine's layers",
    "t5 1x2x1, every second divided, Transformer Engine's layers",
    "gpt 2x1x1, sequence parallel, divided, Transformer Engine's layers",
)
"""Backward passes in halves, with biases; the last with a rank on each GPU."""
SPREAD = (
    "t5 1x2x1, recompute mixed",
    "gpt 1x2x1, two chunks",
    "gpt 1x4x2, distributed optimizer, overlapped, gathered in passes",
    "t5 2x2x1, sequence parallel",
)
"""Layouts with a rank on each GPU; the first two also where little is checked."""


def entry(case: Case, *, family: str, ranks: int, extra: str = "") -> Figures:
    """Stages through the entry script and Megatron's loop: the losses it logs, against the same run on the CPU, which
    takes none of the `extra` flags. Both go on from one iteration on the CPU, since devices draw other weights."""
    script = f"pretrain_{family}_multitask.py --dynapipe-config configs/demo_{family}.yaml --global-batch-size 16"
    script += " --eval-iters 0 --lr-warmup-fraction 0 --dynapipe-calibrate 0"
    saved = case.folder / f"{family}-on-cpu"
    more = f" --load {saved} --no-load-rng --override-opt-param-scheduler --train-iters {case.steps}"
    more += f" --pipeline-model-parallel-size {ranks}" + " --distributed-backend gloo" * (ranks > 1)  # NCCL refuses

    def run_on(device: str, flags: str, ranks: int) -> str:
        flags += f" --dynapipe-device {device} --dynapipe-report-dir {case.new_folder()}"
        return case.torchrun(f"{script} {flags}", ranks=ranks)[0]

    def losses_on(device: str, flags: str) -> torch.Tensor:
        losses = torch.tensor([*map(float, LOSS.findall(run_on(device, flags, ranks)))])
        if len(losses) != case.steps - 1:
            raise ProcessFailedError(f"expected {case.steps - 1} losses in the log, found {len(losses)}")
        return losses

    first = f" --pipeline-model-parallel-size 1 --train-iters 1 --save {saved} --save-interval 1"
    case.once.get(("saved", family), lambda: run_on("cpu", first, 1))
    with ThreadPoolExecutor(1) as beside:
        on_cpu = beside.submit(case.once.get, ("losses", family, ranks), lambda: losses_on("cpu", more))
        losses = losses_on(case.device, more + extra)
    apart = ((losses - on_cpu.result()) / on_cpu.result()).abs().max().item()
    return within({"losses": (apart, 10 * EXACT)}) | {"iterations": len(losses)}


def engine(case: Case) -> Figures:
    """Transformer Engine's layers in fp32, against local ones on the CPU, whose checkpoint lacks their empty states."""
    need_engine(case)
    return entry(case, family="t5", ranks=1, extra=" --transformer-impl transformer_engine")


def gpu_tests(case: Case) -> Figures:
    """Run the tests marked `gpu`, files side by side where pytest can; what they say is kept beside the report."""
    if case.device == "cpu":
        raise NotRunError("no GPU")
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    side_by_side = ["-n", "4", "--dist", "loadfile"] if find_spec("xdist") else []
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb", "short", *side_by_side, *files]
    reasons = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}  # why Transformer Engine picks a kernel; of failed tests
    log = case.output.with_name(f"{case.output.stem}-tests")
    said = run([words], case.budget, environments=[COMPILERS | reasons], log=log)[0]
    return {"summary": said.strip().splitlines()[-1]}


def model_of(row: str) -> str:
    """One rank of a layout's model."""
    layout = named(row)
    relative = f", relative positions, hidden {layout.hidden}" if layout.positions == "relative" else ""
    return f"{layout.family} 1x1x1{relative}"


def reference(case: Case, model: str) -> Any:
    """What one process on the CPU learns of samples one by one."""
    return case.once.get(("reference", model), lambda: case.train(model, "reference", device="cpu")[0])


def stages(case: Case, *, row: str, exact: bool = False) -> Figures:
    """One rank over NCCL, several through the host of one GPU, tensor-parallel ones apart, within bounds of the
    reference: of fp32 where it is exact, else of bf16."""
    layout = named(row)
    if layout.engine:
        need_engine(case)
    if layout.tensor > 1:
        need_devices(case, layout.ranks)
    model = model_of(row)
    gradients, losses = deviation(case.train(row, alone=layout.tensor == 1), reference(case, model))
    most = (EXACT, EXACT) if exact else case.once.get(("noise", model), lambda: bf16_bounds(case, model))
    return within({"gradients": (gradients, most[0]), "losses": (losses, most[1])})


def bf16_bounds(case: Case, model: str) -> tuple[float, float]:
    """Of gradients and losses: twice as far from the reference, at most, as one process is that gets the same samples
    in two orders; losses are allowed one rounding besides."""
    alone = [case.train(f"{model}, bf16{order}") for order in ("", ", samples reversed")]
    gradients, losses = zip(*(deviation(order, reference(case, model)) for order in alone), strict=True)
    return 2 * max(gradients), max(2 * max(losses), BF16_ROUNDING)


def spread(case: Case, *, row: str) -> Figures:
    """Each rank on a GPU of its own, over NCCL, under the rules of training there, against samples one by one."""
    need_devices(case, named(row).ranks)
    learned = case.train(f"{row}, rules of CUDA", alone=False)
    gradients, losses = deviation(learned, reference(case, model_of(row)))
    return within({"gradients": (gradients, EXACT), "losses": (losses, EXACT)})


def soak(case: Case, *, alone: bool) -> Figures:
    """Iterations of changing shapes on two stages: nothing is kept from one to the next."""
    if not alone:
        need_devices(case, 2)
    steps = 16 if case.small else 100 if alone else 500
    of_ranks = case.train("t5 1x2x1, rules of CUDA", "soak", steps=steps, alone=alone)
    grown = {name: max(rank[name][-1] - rank[name][0] for rank in of_ranks) for name in ("tensors", "bytes")}
    reserved = max(rank["reserved_mb"][-1] - rank["reserved_mb"][0] for rank in of_ranks)
    return within({name: (float(more), 0.0) for name, more in grown.items()}) | {"reserved_mb": reserved}


def large_messages(case: Case) -> Figures:
    """The lists of a T5 of four stages as a job of tensor 2 runs them, with passes of one product each."""
    ranks = 4 if case.small else 8
    need_devices(case, ranks)
    of_ranks = case.train(f"t5 {ranks // 4}x4x1, rules of CUDA", "lists", alone=False)
    return {name: max(rank[name] for rank in of_ranks) for name in ("largest_message_mb", "messages", "seconds")}


def sanitizer(case: Case) -> Figures:
    """A short run under compute-sanitizer's memcheck, every allocation by itself. Calls of the driver that fail are not
    counted: torch and NCCL ask for what may be missing."""
    tool = shutil.which("compute-sanitizer")
    if case.device == "cpu" or tool is None:
        raise NotRunError("no GPU" if case.device == "cpu" else "compute-sanitizer is not installed")
    words = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    words += ["--target-processes", "all", *WORKER, "--device", "cuda"]
    (where,) = environments("cuda", 1)
    ranks = Ranks(words, [where | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}], case.new_folder())
    ranks.carry_out(case.budget, layout="t5 1x1x1", what="train", steps=1)
    ranks.processes.wait(case.budget.deadline())
    (said,) = ranks.processes.outputs()
    return {"summary": next((line for line in said.splitlines() if "ERROR SUMMARY" in line), "")}


def checks(case: Case) -> Iterator[Check]:
    """What is checked, in order: what decides most comes first, if time runs out."""
    for family in case.families:
        yield Check(f"{family}: entry script against the CPU", partial(entry, family=family, ranks=1), 60)
    yield Check("t5: entry script, 2 stages on one device, against the CPU", partial(entry, family="t5", ranks=2), 60)
    yield Check("tests marked gpu", gpu_tests, 90)
    yield Check("t5: 2 stages on one device, fp32", partial(stages, row="t5 1x2x1", exact=True))
    for family in case.families:
        row = f"{family} 1x1x1"
        yield Check(f"{family}: one rank against the CPU", partial(stages, row=row, exact=True))
    for name, row in PARTS.items():
        if row.split()[0] in case.families or "packed" not in name:
            yield Check(name, partial(stages, row=f"{row}, bf16"))
    if not case.small:
        for row in ENGINE:
            yield Check(f"{row}, bf16", partial(stages, row=f"{row}, bf16"))
    yield Check("t5: entry script, Transformer Engine's layers, against the CPU", engine, 60)
    yield Check("soak: 2 stages on one device", partial(soak, alone=True))
    for family in case.families:
        for count in (2,) if case.small else (2, 4):
            row = f"{family} 1x{count}x1, bf16"
            yield Check(f"{family}: {count} stages on one device, bf16", partial(stages, row=row))
    if not case.small:
        yield Check("t5: packed and padded rows, fp32", partial(stages, row="t5 1x1x1, rows mixed", exact=True))
    for row in SPREAD[:2] if case.small else SPREAD:
        yield Check(f"over NCCL: {row}", partial(spread, row=row))
    yield Check("over NCCL: soak", partial(soak, alone=False))
    yield Check("over NCCL: lists of a t5, tensor 2, 4 stages, messages above NCCL's buffers", large_messages)


def sanitized(case: Case) -> Iterator[Check]:
    """What takes the device's whole memory, so that nothing else runs beside it, and minutes."""
    yield Check("compute-sanitizer", sanitizer, 280)
