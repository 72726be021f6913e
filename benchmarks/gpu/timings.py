"""What is measured, each thing alone on the machine: speeds, and how long what a user waits for takes."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import DEMO_DATA, ROOT
from benchmarks.gpu.case import Case, Check, Figures, need_devices, need_engine, within
from benchmarks.gpu.machine import ProcessFailedError
from benchmarks.gpu.measure import KERNELS, MEASURED
from tests.helpers.layouts.layout import named

RATIO = 1.02
"""Of iteration times, executor to Megatron's own schedule."""
VARYING_RATIO = 0.95
"""The same on varying shapes, to `variable_seq_lengths`."""
END_S = 10.0
"""What a script with a budget of its own may take beyond it, to end."""


def probe(case: Case, *, what: str, row: str) -> Figures:
    """Figures of `probes`, of the rank with the most of each."""
    need_devices(case, named(row).ranks)
    of_ranks = case.train(row, what, alone=named(row).ranks == 1)
    return {name: max(figures[name] for figures in of_ranks) for name in of_ranks[0]}


def overhead(case: Case, *, script: str, ranks: int, bound: float) -> Figures:
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


def throughput(case: Case, *, family: str) -> Figures:
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
    return _compared(case, words, report)


ALL = "--dynapipe-loss everything"
EIGHT_BITS = f"{ALL} --fp8-format hybrid --fp8-recipe"


def against_stock(case: Case, *, flags: str = "", methods: str = "planned,stock_packed") -> Figures:
    """Six layers of LLaMA 3 8B by plans, and by Megatron's own training of packed rows, in turns on one GPU."""
    need_engine(case)
    report = case.new_folder() / "stock.json"
    words = ["--device", case.device, "--size", "gpu", "--model", "gpt", "--methods", methods]
    words += ["--together", "1", "--profile-minutes", "0", "--rounds", "1", "--batches", "2", "--ranks", "1"]
    words += ["--json", str(report), "--", "--dynapipe-config", str(ROOT / "benchmarks/throughput/gpu_llama.yaml")]
    words += ["--transformer-impl", "transformer_engine", *flags.split()]
    words += [word for name in KERNELS for word in ("--dynapipe-unset", name)]
    return _compared(case, words, report)


def _compared(case: Case, words: Sequence[str], report: Path) -> Figures:
    """Figures of the comparison of methods that these words start; what was compared before it failed is known."""
    try:
        case.run("benchmarks/throughput/run.py", *words)
    except ProcessFailedError as failure:
        if report.exists():
            failure.figures = throughput_figures(json.loads(report.read_text())["rows"])
        raise
    return throughput_figures(json.loads(report.read_text())["rows"])


def throughput_figures(rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Speeds of the methods of a report, their ratios to the planned runs, and on one stage the shares of an iteration
    that lie outside of passes, and in the optimizer: the rest is reduction, zeroing and what waits for the host."""
    speeds = {f"{row['method']}_tokens_per_s": row["tokens_per_second"] for row in rows}
    shares = {
        f"{row['method']}_{name}": row[key]
        for row in rows
        for key, name in (("idle", "outside_passes"), ("optimizer_share", "optimizer"))
        if row.get(key) is not None
    }
    losses = {f"{row['method']}_first_loss": row["first_loss"] for row in rows if "first_loss" in row}
    return (
        speeds
        | losses
        | shares
        | {f"{row['method']}_ratio": row["ratio_to_planned"][1] for row in rows if row["method"] != "planned"}
    )


def certificate(case: Case) -> Figures:
    """How long `certify` takes for the demo's GPT on one rank, in fp32, and how far its runs are apart."""
    flags = "--dynapipe-config configs/demo_gpt.yaml --pipeline-model-parallel-size 1 --global-batch-size 16"
    flags += f" --dynapipe-device {case.device}"
    words = f"-m megatron_dynapipe certify --ranks 1 --iterations 2 --json -- {flags}"
    began = time.monotonic()
    found = json.loads(case.run(*words.split()))["checks"]
    worst = max(found, key=lambda check: check["error"] / check["allowed"])
    return {"certify_s": time.monotonic() - began, worst["name"]: worst["error"], "allowed": worst["allowed"]}


def script(case: Case, *words: str, name: str, output: Path) -> Figures:
    """A script of this folder, which writes its own figures beside the report, after each."""
    of_all = ["--device", case.device, *["--small"] * case.small, "--budget-s", f"{case.budget.left - END_S:.0f}"]
    case.run(ROOT / "benchmarks" / "gpu" / name, *of_all, *words, "--output", output)
    return {"output": str(output)}


def stages(case: Case) -> Figures:
    """`stages.py`, with the costs that `measure.py` has measured well, now or in a call before with this report."""
    report = case.output.with_suffix("") / "measure.json"
    rows = json.loads(report.read_text())["costs"] if report.exists() else []
    files = {row["model"]: report.with_name(f"{row['name']}.json") for row in rows if row["outcome"] == MEASURED}
    costs = [f"{model}={path}" for model, path in files.items()]
    words = ["--cost-model", *costs] if costs else []
    output = case.output.with_name(f"{case.output.stem}-stages.json")
    return script(case, *words, name="stages.py", output=output)


def measurements(case: Case) -> Iterator[Check]:
    """What is measured, one after another."""
    folder = case.output.with_suffix("")
    yield Check("costs of models' layers", partial(script, name="measure.py", output=folder), 150)
    for loss in ("everything", "targets"):
        name = f"llama: planned against Megatron's own packed rows, loss on {loss}"
        yield Check(name, partial(against_stock, flags=f"--dynapipe-loss {loss}"), 120)
        if loss == "everything":  # in turns with the planned run above, on a machine that is as warm
            by_pytorch = partial(against_stock, flags=f"{ALL} --dynapipe-attention sdpa", methods="planned")
            yield Check("llama: planned, attention by PyTorch's FlashAttention", by_pytorch, 60)
            yield Check("llama: planned again", partial(against_stock, flags=ALL, methods="planned"), 60)
    for recipe in ("tensorwise", "blockwise"):  # beside the first of the two above
        in_eight_bits = partial(against_stock, flags=f"{EIGHT_BITS} {recipe}", methods="planned")
        yield Check(f"llama: planned in eight bits, {recipe}", in_eight_bits, 60)
    yield Check("certify", certificate, 60)
    overheads = (
        ("executor against Megatron, 1 stage", "overhead", 1, RATIO),
        ("executor against Megatron, 2 stages", "overhead", 2, RATIO),
        ("executor against variable_seq_lengths", "messages", 2, VARYING_RATIO),
    )
    for name, kind, ranks, bound in overheads:
        yield Check(name, partial(overhead, script=kind, ranks=ranks, bound=bound), 40)
    for family in case.families:
        yield Check(f"{family}: throughput of real training", partial(throughput, family=family), 120)
    if not case.small:
        of_experts = partial(probe, what="experts", row="gpt 1x1x1, hidden 256, bf16")
        yield Check("experts: the host's time for a layer", of_experts)
        row = "gpt 2x1x1, hidden 1024, sequence parallel, divided, bf16"
        yield Check("tensor parallel: transfers beside products", partial(probe, what="transfers", row=row))


def composed(case: Case) -> Iterator[Check]:
    """One device in place of every stage in turn."""
    yield Check("one device for every stage", stages, 270)
