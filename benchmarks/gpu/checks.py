"""What is checked on a GPU, in the order of what decides most; README.md beside this file has the bounds."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import DEMO_DATA, ROOT, torchrun
from benchmarks.gpu.machine import Budget, NotRunError, ProcessFailedError, Ranks, run
from megatron_dynapipe.integration.entry.bootstrap import environment
from tests.helpers.layouts.compare import deviation
from tests.helpers.layouts.layout import named
from tests.store.servers import free_port

EXACT = 1e-4
"""How far fp32 may be from one process with samples one by one, relative: the bound of docs/parallelism.md."""
BF16_ROUNDING = torch.finfo(torch.bfloat16).eps
RATIO = 1.02
"""Of iteration times, executor to Megatron's own schedule."""
VARYING_RATIO = 0.95
"""The same on varying shapes, to `variable_seq_lengths`."""
LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")
KEPT = 4
"""Sets of ranks that stay up at a time."""

Figures = dict[str, float | int | str]
Bounds = tuple[float, float]
"""Of the relative distances of gradients and of losses."""
Reference = Callable[[str], Any]

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


class OutOfBoundsError(Exception):
    """A figure that does not hold; the first argument has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the checks are run here."""

    device: str
    small: bool
    budget: Budget
    folder: Path
    _up: dict[tuple[object, ...], Ranks] = field(default_factory=dict)

    @property
    def families(self) -> Sequence[str]:
        return ("t5",) if self.small else ("t5", "gpt")

    @property
    def steps(self) -> int:
        return 2 if self.small else 5

    def train(
        self, row: str, what: str = "train", *, alone: bool = True, device: str = "", steps: int = 0
    ) -> list[Any]:
        """What every rank of a layout (`named` reads it) learned: all of them on one device, or apart.

        Ranks stay up for the next layout of as many, since each start takes seconds; those that failed start anew.
        """
        layout, device = named(row), device or self.device
        key = (device, layout.ranks, layout.tensor > 1, alone)
        ranks = self._up.pop(key, None) or self._started(device, layout.ranks, layout.tensor, alone=alone)
        learned = ranks.carry_out(self.budget, layout=row, what=what, steps=steps or self.steps, port=free_port())
        while len(self._up) >= KEPT:
            self._up.pop(next(iter(self._up))).processes.kill()
        self._up[key] = ranks
        return learned

    def _started(self, device: str, count: int, tensor: int, *, alone: bool) -> Ranks:
        words = [*WORKER, "--device", device, *([] if alone else ["--spread"])]
        return Ranks(words, environments(device, count, tensor, alone=alone), self.new_folder())

    def end(self) -> None:
        """End the ranks that are up."""
        while self._up:
            self._up.popitem()[1].processes.kill()

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def torchrun(self, *scripts: str, ranks: int = 1) -> list[str]:
        """Standard outputs of scripts with their flags, each under a torchrun, side by side."""
        words = [[*torchrun(ranks), *script.split()] for script in scripts]
        threads = [{"OMP_NUM_THREADS": "1"}] * len(words)
        return run(words, self.budget, environments=threads, log=self.new_folder() / "torchrun")


def environments(device: str, count: int, tensor: int = 1, *, alone: bool = True) -> list[dict[str, str]]:
    """Of so many ranks, as a run sets it: all on the first device, or apart."""
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    common["OMP_NUM_THREADS"] = "1"
    if device == "cuda":  # one hardware queue with tensor parallelism
        major, _ = torch.cuda.get_device_capability()
        common |= environment(tensor_parallel=tensor, capability=major, environ=os.environ)
    return [common | {"RANK": str(r), "LOCAL_RANK": str(0 if alone else r)} for r in range(count)]


LoggedLosses = dict[tuple[str, int], torch.Tensor]
"""Of the CPU's runs of a family on so many ranks."""


def entry(case: Case, on_cpu: LoggedLosses, family: str, ranks: int, extra: str = "") -> Figures:
    """Stages through the entry script and Megatron's loop: the losses it logs, against the same run on the CPU, which
    takes none of the `extra` flags. Both go on from one iteration on the CPU, since devices draw other weights."""
    script = f"pretrain_{family}_multitask.py --dynapipe-config configs/demo_{family}.yaml --global-batch-size 16"
    script += " --eval-iters 0 --lr-warmup-fraction 0 --dynapipe-calibrate 0"
    saved = case.folder / f"{family}-on-cpu"
    if not saved.exists():
        first = (
            f"--pipeline-model-parallel-size 1 --train-iters 1 --save {saved} --save-interval 1 --dynapipe-device cpu"
        )
        case.torchrun(f"{script} {first} --dynapipe-report-dir {case.new_folder()}")
    script += f" --load {saved} --no-load-rng --override-opt-param-scheduler --train-iters {case.steps}"
    script += f" --pipeline-model-parallel-size {ranks}" + " --distributed-backend gloo" * (
        ranks > 1
    )  # as NCCL refuses
    devices = {case.device: extra} | ({} if (family, ranks) in on_cpu else {"cpu": ""})
    scripts = [
        f"{script} {more} --dynapipe-device {device} --dynapipe-report-dir {case.new_folder()}"
        for device, more in devices.items()
    ]
    logged = [torch.tensor([*map(float, LOSS.findall(said))]) for said in case.torchrun(*scripts, ranks=ranks)]
    losses, expected = logged[0], on_cpu.setdefault((family, ranks), logged[-1])
    if not len(losses) == len(expected) == case.steps - 1:
        raise ProcessFailedError(
            f"expected {case.steps - 1} losses, found {len(losses)} and {len(expected)} in the logs"
        )
    apart = ((losses - expected) / expected).abs().max().item()
    return within({"losses": (apart, 10 * EXACT)}) | {"iterations": len(expected)}


def engine(case: Case, on_cpu: LoggedLosses) -> Figures:
    """Transformer Engine's layers in fp32, against local ones with weights of the same seed on the CPU."""
    need_engine(case)
    return entry(case, on_cpu, "t5", 1, "--transformer-impl transformer_engine")


def gpu_tests(case: Case) -> Figures:
    """Run the tests marked `gpu`."""
    if case.device == "cpu":
        raise NotRunError("no GPU")
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *files]
    return {"summary": run([words], case.budget, log=case.folder / "pytest")[0].strip().splitlines()[-1]}


def model_of(row: str) -> str:
    """One rank of a layout's model."""
    layout = named(row)
    relative = f", relative positions, hidden {layout.hidden}" if layout.positions == "relative" else ""
    return f"{layout.family} 1x1x1{relative}"


def stages(case: Case, reference: Reference, bounds: Callable[[str], Bounds], row: str) -> Figures:
    """One rank over NCCL, several through the host of one GPU, tensor-parallel ones apart, within bounds of the
    reference."""
    layout = named(row)
    if layout.engine:
        need_engine(case)
    if layout.tensor > 1:
        need_devices(case, layout.ranks)
    gradients, losses = deviation(case.train(row, alone=layout.tensor == 1), reference(model_of(row)))
    most = bounds(model_of(row))
    return within({"gradients": (gradients, most[0]), "losses": (losses, most[1])})


def bf16_bounds(case: Case, reference: Reference, model: str) -> Bounds:
    """Twice as far from the reference, at most, as one process is that gets the same samples in two orders; losses are
    allowed one rounding besides."""
    alone = [case.train(f"{model}, bf16{order}") for order in ("", ", samples reversed")]
    gradients, losses = zip(*(deviation(order, reference(model)) for order in alone), strict=True)
    return 2 * max(gradients), max(2 * max(losses), BF16_ROUNDING)


def spread(case: Case, reference: Reference, row: str) -> Figures:
    """Each rank on a GPU of its own, over NCCL, under the rules of training there, against samples one by one."""
    need_devices(case, named(row).ranks)
    gradients, losses = deviation(case.train(f"{row}, rules of CUDA", alone=False), reference(model_of(row)))
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


def need_devices(case: Case, ranks: int) -> None:
    """Raise NotRunError where ranks would share a GPU, which NCCL refuses."""
    if case.device == "cuda" and torch.cuda.device_count() < ranks:
        raise NotRunError(f"{ranks} GPUs are needed, each with one rank over NCCL; found {torch.cuda.device_count()}")


def need_engine(case: Case) -> None:
    """Raise NotRunError without a GPU or without Transformer Engine."""
    if case.device == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        raise NotRunError("no GPU" if case.device == "cpu" else "Transformer Engine is not installed")


def probe(case: Case, what: str, row: str) -> Figures:
    """Figures of `probes`, of the rank with the most of each."""
    need_devices(case, named(row).ranks)
    of_ranks = case.train(row, what, alone=named(row).ranks == 1)
    return {name: max(figures[name] for figures in of_ranks) for name in of_ranks[0]}


def overhead(case: Case, script: str, ranks: int, bound: float) -> Figures:
    """Iteration times of the executor and of Megatron's schedule, in turn."""
    need_devices(case, ranks)
    sizes = "--hidden 1024 --length 512 --size 4 --layers 8 --pairs 100"
    if case.device == "cpu":
        sizes = "--hidden 32 --length 32 --size 2 --layers 4 --micro-batches 4 --pairs 3 --warm-up 1"
    (said,) = case.torchrun(f"-m benchmarks.executor.{script} {sizes}", ranks=ranks)
    report = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    low, high = report["interval_95"]
    measured = {"megatron_ms": report["megatron_ms"], "executor_ms": report["executor_ms"], "low": low, "high": high}
    most = math.inf if case.device == "cpu" else bound  # a few small pairs on a busy CPU say nothing of the ratio
    return within({"ratio": (report["ratio"], most)}) | measured


def throughput(case: Case, family: str) -> Figures:
    """Real training by several methods in turns (`../throughput/run.py`), which stops if their first losses differ."""
    report = case.folder / f"throughput-{family}.json"
    words = ["--device", case.device, "--size", "gpu", "--model", family, "--profile-minutes", "0", "--rounds", "1"]
    words += ["--json", str(report), "--ranks", "1"]
    if case.small:
        layers = "--encoder-num-layers 2 --decoder-num-layers 2" if family == "t5" else "--num-layers 2"
        words += ["--methods", "planned,token_based", "--batches", "1", "--data", str(DEMO_DATA)]
        words += ["--max-lengths", "128", "--", "--hidden-size", "64", "--ffn-hidden-size", "128"]
        words += ["--num-attention-heads", "4", "--global-batch-size", "8", *layers.split()]
    else:
        words += ["--methods", "planned,packed_rows,token_based", "--batches", "3"]
    log = case.folder / f"throughput-{family}"
    run([[sys.executable, "benchmarks/throughput/run.py", *words]], case.budget, log=log)
    return throughput_figures(json.loads(report.read_text())["rows"])


def throughput_figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Speeds of the methods of a report, and their ratios to the planned runs."""
    speeds = {f"{row['method']}_tokens_per_s": row["tokens_per_second"] for row in rows}
    return speeds | {f"{row['method']}_ratio": row["ratio_to_planned"][1] for row in rows if row["method"] != "planned"}


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
    ranks.carry_out(case.budget, layout="t5 1x1x1", what="train", steps=1, port=free_port())
    ranks.processes.wait(case.budget.deadline())
    (said,) = ranks.processes.outputs()
    return {"summary": next((line for line in said.splitlines() if "ERROR SUMMARY" in line), "")}


def within(measured: Mapping[str, tuple[float, float]]) -> Figures:
    """The figures with their bounds; raises OutOfBoundsError if one does not hold."""
    figures: Figures = {}
    for name, (value, bound) in measured.items():
        figures |= {name: value} if math.isinf(bound) else {name: value, f"{name}_bound": bound}
    if any(not value <= bound for value, bound in measured.values()):
        raise OutOfBoundsError(figures)
    return figures


def checks(case: Case) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """What is checked, in order: what decides most comes first, if time runs out."""

    @cache
    def reference(model: str) -> Any:
        return case.train(model, "reference", device="cpu")[0]

    on_cpu: LoggedLosses = {}
    noise = cache(partial(bf16_bounds, case, reference))

    def exact(_: str) -> Bounds:
        return EXACT, EXACT

    for family in case.families:
        yield f"{family}: entry script against the CPU", partial(entry, case, on_cpu, family, 1)
    two = "t5: entry script, 2 stages on one device, against the CPU"
    yield two, partial(entry, case, on_cpu, "t5", 2)
    yield "t5: 2 stages on one device, fp32", partial(stages, case, reference, exact, "t5 1x2x1")
    for family in case.families:
        yield f"{family}: one rank against the CPU", partial(stages, case, reference, exact, f"{family} 1x1x1")
    for name, row in PARTS.items():
        if row.split()[0] in case.families or "packed" not in name:
            yield name, partial(stages, case, reference, noise, f"{row}, bf16")
    yield "executor against Megatron, 1 stage", partial(overhead, case, "overhead", 1, RATIO)
    for family in case.families:
        yield f"{family}: throughput of real training", partial(throughput, case, family)
    yield "tests marked gpu", partial(gpu_tests, case)
    if not case.small:
        for row in ENGINE:
            yield f"{row}, bf16", partial(stages, case, reference, noise, f"{row}, bf16")
        yield "experts: the host's time for a layer", partial(probe, case, "experts", "gpt 1x1x1, hidden 256, bf16")
        row = "gpt 2x1x1, hidden 1024, sequence parallel, divided, bf16"
        yield "tensor parallel: transfers beside products", partial(probe, case, "transfers", row)
    yield "soak: 2 stages on one device", partial(soak, case, alone=True)
    for family in case.families:
        for count in (2,) if case.small else (2, 4):
            row = f"{family} 1x{count}x1, bf16"
            yield f"{family}: {count} stages on one device, bf16", partial(stages, case, reference, noise, row)
    if not case.small:
        mixed = partial(stages, case, reference, exact, "t5 1x1x1, rows mixed")
        yield "t5: packed and padded rows, fp32", mixed
    for row in SPREAD[:2] if case.small else SPREAD:
        yield f"over NCCL: {row}", partial(spread, case, reference, row)
    yield "over NCCL: soak", partial(soak, case, alone=False)
    yield "over NCCL: lists of a t5, tensor 2, 4 stages, messages above NCCL's buffers", partial(large_messages, case)
    yield "executor against Megatron, 2 stages", partial(overhead, case, "overhead", 2, RATIO)
    yield "executor against variable_seq_lengths", partial(overhead, case, "messages", 2, VARYING_RATIO)
    yield "t5: entry script, Transformer Engine's layers, against the CPU", partial(engine, case, on_cpu)
    yield "compute-sanitizer", partial(sanitizer, case)
