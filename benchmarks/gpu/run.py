"""Everything that is to be checked on a GPU, by one command on a machine with one (or more), in ten minutes.

    python benchmarks/gpu/run.py [--output gpu-report.json]
    python benchmarks/gpu/run.py --device cpu --small        # the same code paths without a GPU, for its own test

README.md beside this file says what is checked and against which bounds. Prints a line per check, writes a JSON file
of all figures with their provenance; exit status 1 if a check failed.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

from benchmarks.common import DEMO_DATA, ROOT, torchrun
from benchmarks.gpu.machine import Budget, NotRunError, ProcessFailedError, provenance, run
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

Figures = dict[str, float | int | str]
Bounds = tuple[float, float]
"""Of the relative distances of gradients and of losses."""


@dataclass(frozen=True, slots=True)
class Check:
    """What became of one check.

    Attributes:
        name: what was checked.
        outcome: passed, failed, or not run.
        figures: what was measured, with the bounds it was held against.
        seconds: it took.
        note: why it failed or was not run.
    """

    name: str
    outcome: str
    figures: Figures
    seconds: float
    note: str = ""


SPREAD = (
    "t5 1x2x1, recompute mixed",
    "gpt 1x2x1, two chunks",
    "gpt 1x4x2, distributed optimizer, overlapped, gathered in passes",
    "t5 2x2x1, sequence parallel",
)
"""Layouts with a rank on each GPU; the first two also where little is checked."""
PARTS = {
    "t5: relative positions in packed rows, by flex_attention": "t5 1x2x1, relative positions, packed",
    "gpt: long samples in slices": "gpt 1x2x1, slices of 16",
    "gpt: half layers, backward passes in halves": "gpt 1x2x1, layers 2.5+1.5, divided",
    "t5: half layers, the encoder's end inside a stage": "t5 1x2x1, layers 1.5+2.5",
}
"""Two stages on one device, in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the checks are run here."""

    device: str
    small: bool
    budget: Budget
    folder: Path

    @property
    def families(self) -> Sequence[str]:
        return ("t5",) if self.small else ("t5", "gpt")

    @property
    def steps(self) -> int:
        return 2 if self.small else 5

    def train(self, row: str, *more: object, alone: bool = True, device: str | None = None) -> list[Any]:
        """What every rank of a layout (`named` reads it) learned, in fresh processes: all on one device, or apart."""
        log, layout = Path(tempfile.mkdtemp(dir=self.folder)) / "rank", named(row)
        words = [sys.executable, "-m", "benchmarks.gpu.worker", "--device", device or self.device]
        words += ["--layout", row, "--steps", str(self.steps), *([] if alone else ["--spread"]), *map(str, more)]
        ranks = layout.ranks
        files = [log.with_suffix(f".{rank}.pt") for rank in range(ranks)]
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        if self.device == "cuda":  # as a run sets it: one hardware queue with tensor parallelism
            major, _ = torch.cuda.get_device_capability()
            common |= environment(tensor_parallel=layout.tensor, capability=major, environ=os.environ)
        run(
            [[*words, "--output", str(file)] for file in files],
            self.budget,
            environments=[common | {"RANK": str(r), "LOCAL_RANK": str(0 if alone else r)} for r in range(ranks)],
            log=log,
        )
        return [torch.load(file, weights_only=True) for file in files]

    def torchrun(self, script: str, flags: str, *, ranks: int = 1) -> str:
        """Standard output of a script under torchrun."""
        log = Path(tempfile.mkdtemp(dir=self.folder)) / "torchrun"
        words = [*torchrun(ranks), *script.split(), *flags.split()]
        return run([words], self.budget, environments=[{"OMP_NUM_THREADS": "1"}], log=log)


def gpu_tests(case: Case) -> Figures:
    """Run the tests marked `gpu`."""
    if case.device == "cpu":
        raise NotRunError("no GPU")
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    return {"summary": run([words], case.budget, log=case.folder / "pytest").strip().splitlines()[-1]}


def one_rank(case: Case, reference: Callable[[str], Any], family: str) -> Figures:
    """One rank, fp32, NCCL: through `Pipeline`, against samples one by one on the CPU."""
    row = f"{family} 1x1x1"
    gradients, losses = deviation(case.train(row), reference(row))
    return within({"gradients": (gradients, EXACT), "losses": (losses, EXACT)})


def entry(case: Case, family: str, ranks: int, extra: str = "") -> Figures:
    """Stages through the entry script and Megatron's loop: the losses it logs, against the same run on the CPU."""
    flags = (
        f"--dynapipe-config configs/demo_{family}.yaml --pipeline-model-parallel-size {ranks}"
        f" --train-iters {case.steps} --eval-iters 0 --global-batch-size 16 --lr-warmup-fraction 0"
        f" --use-cpu-initialization --dynapipe-calibrate 0 {extra}"
    )
    losses = {}
    for device in dict.fromkeys((case.device, "cpu")):
        where = f" --dynapipe-device {device} --dynapipe-report-dir {case.folder / f'{family}-{ranks}-{device}'}"
        where += " --distributed-backend gloo" if ranks > 1 else ""  # NCCL refuses two ranks on one GPU
        said = case.torchrun(f"pretrain_{family}_multitask.py", flags + where, ranks=ranks)
        losses[device] = torch.tensor([float(loss) for loss in LOSS.findall(said)])
        if not len(losses[device]):
            raise ProcessFailedError(f"no loss in the log:\n{said[-1000:]}")
    apart = ((losses[case.device] - losses["cpu"]) / losses["cpu"]).abs().max().item()
    return within({"losses": (apart, 10 * EXACT)}) | {"iterations": len(losses["cpu"])}


def model_of(row: str) -> str:
    """One rank of a layout's model."""
    layout = named(row)
    return f"{layout.family} 1x1x1" + (", relative positions" if layout.positions == "relative" else "")


def stages(case: Case, reference: Callable[[str], Any], bounds: Callable[[str], Bounds], row: str) -> Figures:
    """Several stages on one GPU, through the host, within bounds of the reference."""
    gradients, losses = deviation(case.train(row), reference(model_of(row)))
    most = bounds(model_of(row))
    return within({"gradients": (gradients, most[0]), "losses": (losses, most[1])})


def spread(case: Case, reference: Callable[[str], Any], row: str) -> Figures:
    """Each rank on a GPU of its own, over NCCL, under the rules of training there, against samples one by one."""
    need_devices(case, named(row).ranks)
    gradients, losses = deviation(case.train(f"{row}, rules of CUDA", alone=False), reference(model_of(row)))
    return within({"gradients": (gradients, EXACT), "losses": (losses, EXACT)})


def soak(case: Case) -> Figures:
    """Hundreds of iterations of changing shapes on two stages: nothing is kept from one to the next."""
    need_devices(case, 2)
    found = case.train("t5 1x2x1, rules of CUDA", "--soak", 16 if case.small else 500, alone=False)
    grown = {name: max(one[name][-1] - one[name][0] for one in found) for name in ("tensors", "bytes")}
    reserved = max(one["reserved_mb"][-1] - one["reserved_mb"][0] for one in found)
    return within({name: (float(more), 0.0) for name, more in grown.items()}) | {"reserved_mb": reserved}


def large_messages(case: Case) -> Figures:
    """The lists of a T5 of four stages as a job of tensor 2 runs them, with passes of one product each."""
    ranks = 4 if case.small else 8
    need_devices(case, ranks)
    found = case.train(f"t5 {ranks // 4}x4x1, rules of CUDA", "--lists", alone=False)
    return {name: max(one[name] for one in found) for name in ("largest_message_mb", "messages", "seconds")}


def engine(case: Case) -> Figures:
    """Layers of Transformer Engine around PyTorch's attention, with weights of the same seed, in fp32."""
    if case.device == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        raise NotRunError("no GPU" if case.device == "cpu" else "Transformer Engine is not installed")
    return entry(case, "t5", 1, "--transformer-impl transformer_engine")


def need_devices(case: Case, ranks: int) -> None:
    """Raise NotRunError where ranks would have to share a GPU, which NCCL refuses."""
    if case.device == "cuda" and torch.cuda.device_count() < ranks:
        raise NotRunError(f"{ranks} GPUs are needed, each with one rank over NCCL; found {torch.cuda.device_count()}")


def bf16_bounds(case: Case, reference: Callable[[str], Any], model: str) -> Bounds:
    """Twice as far from the reference, at most, as one process is that gets the same samples in two orders; losses are
    allowed one rounding besides."""
    alone = [case.train(f"{model}, bf16{order}") for order in ("", ", samples reversed")]
    gradients, losses = zip(*(deviation(found, reference(model)) for found in alone), strict=True)
    return 2 * max(gradients), max(2 * max(losses), BF16_ROUNDING)


def overhead(case: Case, script: str, ranks: int, bound: float) -> Figures:
    """Iteration times of the executor and of Megatron's schedule, in turn."""
    need_devices(case, ranks)
    sizes = "--hidden 1024 --length 512 --size 4 --layers 8 --pairs 100"
    if case.device == "cpu":
        sizes = "--hidden 32 --length 32 --size 2 --layers 4 --micro-batches 4 --pairs 3 --warm-up 1"
    said = case.torchrun(f"-m benchmarks.executor.{script}", sizes, ranks=ranks)
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    low, high = found["interval_95"]
    measured = {"megatron_ms": found["megatron_ms"], "executor_ms": found["executor_ms"], "low": low, "high": high}
    held = math.inf if case.device == "cpu" else bound  # a few small pairs on a busy CPU say nothing of the ratio
    return within({"ratio": (found["ratio"], held)}) | measured


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
        words += ["--methods", "planned,packed_rows,token_based", "--batches", "4"]
    log = case.folder / f"throughput-{family}"
    run([[sys.executable, "benchmarks/throughput/run.py", *words]], case.budget, log=log)
    rows = json.loads(report.read_text())["rows"]
    speeds = {f"{row['method']}_tokens_per_s": row["tokens_per_second"] for row in rows}
    return speeds | {f"{row['method']}_ratio": row["ratio"][1] for row in rows if row["method"] != "planned"}


def sanitizer(case: Case) -> Figures:
    """A short run under compute-sanitizer's memcheck, every allocation by itself."""
    tool = shutil.which("compute-sanitizer")
    if case.device == "cpu" or tool is None:
        raise NotRunError("no GPU" if case.device == "cpu" else "compute-sanitizer is not installed")
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all", sys.executable]
    words += ["-m", "benchmarks.gpu.worker", "--device", "cuda", "--layout", "t5 1x1x1", "--steps", "1"]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    output = ["--output", str(case.folder / "sanitized.pt")]
    said = run([[*words, *output]], case.budget, environments=[environment], log=case.folder / "sanitizer")
    return {"summary": next((line for line in said.splitlines() if "ERROR SUMMARY" in line), "")}


class OutOfBoundsError(Exception):
    """A figure that does not hold; the first argument has all of them."""


def within(measured: Mapping[str, tuple[float, float]]) -> Figures:
    """The figures with their bounds; raises OutOfBoundsError if one does not hold."""
    figures: Figures = {}
    for name, (value, bound) in measured.items():
        figures |= {name: value} if math.isinf(bound) else {name: value, f"{name}_bound": bound}
    if any(not value <= bound for value, bound in measured.values()):
        raise OutOfBoundsError(figures)
    return figures


def checks(case: Case) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """What is checked, in order: what says most comes first, if time runs out."""

    @cache
    def reference(model: str) -> Any:
        return case.train(model, "--reference", device="cpu")[0]

    yield "tests marked gpu", partial(gpu_tests, case)
    for family in case.families:
        yield f"{family}: one rank against the CPU", partial(one_rank, case, reference, family)
    noise = cache(partial(bf16_bounds, case, reference))
    staged = {
        f"{family}: {count} stages on one device, bf16": f"{family} 1x{count}x1"
        for family in case.families
        for count in ((2,) if case.small else (2, 4))
    }
    staged |= {f"{each}: packed rows, 2 stages on one device, bf16": f"{each} 1x2x1, packed" for each in case.families}
    for name, row in (staged | PARTS).items():
        yield name, partial(stages, case, reference, noise, f"{row}, bf16")
    if not case.small:
        mixed = partial(stages, case, reference, lambda _: (EXACT, EXACT), "t5 1x1x1, rows mixed")
        yield "t5: packed and padded rows, fp32", mixed
    two = partial(stages, case, reference, lambda _: (EXACT, EXACT), "t5 1x2x1")
    yield "t5: 2 stages on one device, fp32", two
    for row in SPREAD[:2] if case.small else SPREAD:
        yield f"over NCCL: {row}", partial(spread, case, reference, row)
    yield "over NCCL: soak", partial(soak, case)
    yield "over NCCL: lists of a t5, tensor 2, 4 stages, messages above NCCL's buffers", partial(large_messages, case)
    yield "executor against Megatron, 1 stage", partial(overhead, case, "overhead", 1, RATIO)
    yield "executor against Megatron, 2 stages", partial(overhead, case, "overhead", 2, RATIO)
    yield "executor against variable_seq_lengths", partial(overhead, case, "messages", 2, VARYING_RATIO)
    for family in case.families:
        yield f"{family}: entry script against the CPU", partial(entry, case, family, 1)
    yield "t5: entry script, 2 stages on one device, against the CPU", partial(entry, case, "t5", 2)
    yield "t5: entry script, Transformer Engine's layers, against the CPU", partial(engine, case)
    for family in case.families:
        yield f"{family}: throughput of real training", partial(throughput, case, family)
    yield "compute-sanitizer", partial(sanitizer, case)


def made(name: str, check: Callable[[], Figures]) -> Check:
    """Make one check."""
    began = time.monotonic()

    def outcome(what: str, figures: Figures, note: str = "") -> Check:
        return Check(name, what, figures, round(time.monotonic() - began, 1), note)

    try:
        return outcome("passed", check())
    except NotRunError as why:
        return outcome("not run", {}, str(why))
    except OutOfBoundsError as found:
        return outcome("failed", found.args[0])
    except ProcessFailedError as failure:
        return outcome("failed", {}, str(failure))


def line_of(check: Check) -> str:
    """What is printed of a check."""
    figures = [f"{name} {v:.3g}" if isinstance(v, float) else f"{name} {v}" for name, v in check.figures.items()]
    return f"{check.outcome:8} {check.name} ({check.seconds} s): {', '.join(figures)} {check.note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="fewer layouts and steps")
    parser.add_argument("--budget-s", type=float, default=570, help="seconds for all checks together")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no CUDA device; --device cpu runs the same code paths without one")
    with tempfile.TemporaryDirectory() as folder:
        case = Case(device=options.device, small=options.small, budget=Budget(options.budget_s), folder=Path(folder))
        done = []
        for name, check in checks(case):
            done.append(made(name, check))
            print(line_of(done[-1]), flush=True)
    report = {"format": "dynapipe-gpu-report/1", **provenance(options.device), "checks": [asdict(one) for one in done]}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.output}; {ROOT.name} at {report['commit']}", file=sys.stderr)
    sys.exit(any(one.outcome == "failed" for one in done))


if __name__ == "__main__":
    main()
