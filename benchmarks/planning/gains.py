"""Who gains how much: plans and other trainers' packed rows, each on its own best layout of a cluster, as `tune` finds.

    python -m benchmarks.planning.gains [--cases "8B 8" …] [--batches N] [--output FOLDER]

Held-out batches of 65,536 tokens (`sft_like`, and `flan_more` for T5s), H100s of 72,000 MB in nodes of eight, computed
costs. Times hold what passes do not hide of reductions, with Megatron's overlap on, and the optimizer step. A line for
each case: what is learned, the longest samples, the time and layout (data · tensor · pipeline × virtual stages) of
plans, of the fastest rows, the ratio of both, and the ratio over Megatron-Bridge's packing on its best layout.

--output keeps the rows of earlier runs that are not asked for again: `gains.json`, `gains.md`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.common import ROOT, environment, markdown
from benchmarks.planning.cases import recorded_batches
from benchmarks.planning.full import write
from megatron_dynapipe import config

COLUMNS = ("case", "learned", "longest", "plans", "fastest rows", "**gain**", "over Bridge's", "seconds", "date")
_OVERLAP = {"overlap-grad-reduce": True, "overlap-param-gather": True, "use-distributed-optimizer": True}
_70B = {
    "num-layers": 80,
    "hidden-size": 8192,
    "num-attention-heads": 64,
    "ffn-hidden-size": 28672,
    "num-query-groups": 8,
    **_OVERLAP,
}


class Case(NamedTuple):
    """A model on so many devices; changes are of its run file."""

    model: str
    devices: int
    learned: str
    longest: int = 2048
    run_file: str = "llama_like_8b"
    changes: tuple[tuple[str, Any], ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.model} {self.devices}"


EVERYTHING, TARGETS = "every position", "targets"
_LLAMA_70B: tuple[tuple[str, Any], ...] = tuple(_70B.items())
CASES = (
    Case("LLaMA 8B", 8, EVERYTHING),
    Case("LLaMA 8B", 8, TARGETS),
    Case("LLaMA 8B", 16, EVERYTHING),
    Case("LLaMA 8B", 16, EVERYTHING, 8192),
    Case("LLaMA 8B", 16, TARGETS),
    Case("T5 XXL", 16, TARGETS, run_file="t5_v1_1_xxl"),
    Case("LLaMA 70B", 32, EVERYTHING, changes=_LLAMA_70B),
    Case("LLaMA 70B", 32, TARGETS, changes=_LLAMA_70B),
    Case("experts 30B", 16, EVERYTHING, run_file="qwen3_30b_a3b"),
    Case("LLaMA 70B, LoRA", 16, EVERYTHING, changes=_LLAMA_70B, flags=("--peft", "lora", "--peft-dim", "16")),
    Case("LLaMA 70B", 64, EVERYTHING, changes=_LLAMA_70B),
    Case("LLaMA 70B", 64, TARGETS, changes=_LLAMA_70B),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[""], help="those whose names contain one of these")
    parser.add_argument("--batches", type=int, default=1, metavar="N", help="of each case, at most 3 (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where rows are kept")
    args = parser.parse_args()
    print(markdown(COLUMNS, []), flush=True)
    for case in CASES:
        if not any(asked in f"{case.name} {case.learned} {case.longest}" for asked in args.cases):
            continue
        row = found(case, args.batches)
        print("| " + " | ".join(cells(row)) + " |", flush=True)
        if args.output:
            keep(row, args.output)


def found(case: Case, count: int) -> dict[str, Any]:
    """A row of what `tune` printed for a case."""
    is_t5 = case.run_file.startswith("t5")
    batches = [
        {key: batch[key] for key in batch if key != "labels" or case.learned == TARGETS}
        for batch in recorded_batches("flan_more" if is_t5 else "sft_like")
        if batch.items() >= {"model": "t5" if is_t5 else "gpt", "max_seq_len": case.longest, "tokens": 65_536}.items()
    ][:count]
    with tempfile.TemporaryDirectory() as name:
        write(Path(name) / "batches.json", batches)
        model = Path(name) / "model.yaml"
        model.write_text(yaml.safe_dump(config.read(ROOT / f"configs/{case.run_file}.yaml") | dict(case.changes)))
        words = ["tune", "--json", "--batches", f"{name}/batches.json", "--model-config", str(model), "--top", "1"]
        words += ["--cost-model", "analytic", "--cluster", "h100_80gb", "--transfers", "gpu", *case.flags]
        words += ["--devices", str(case.devices)]
        command = [sys.executable, "-m", "megatron_dynapipe", *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    tuned = json.loads(done.stdout)
    fastest = min(tuned["rivals"], key=lambda name: tuned["rivals"][name]["predicted_ms"])
    return {
        "case": case.name,
        "learned": case.learned,
        "longest": case.longest,
        "batches": len(batches),
        "plans": _layout(tuned["layouts"][0]),
        "rows": [fastest, *_layout(tuned["rivals"][fastest])],
        "gain": tuned["gain"],
        "bridge": tuned["rivals"]["bridge"]["predicted_ms"] / tuned["layouts"][0]["predicted_ms"]
        if "bridge" in tuned["rivals"]
        else None,
        "seconds": tuned["seconds"],
        "date": time.strftime("%Y-%m-%d"),
    }


def _layout(tuned: dict[str, Any]) -> list[Any]:
    sizes = "·".join(str(tuned[name]) for name in ("data_parallel", "tensor_parallel", "pipeline_parallel"))
    return [tuned["predicted_ms"], sizes + f"×{tuned['chunks']}" * (tuned["chunks"] > 1)]


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    (ms, layout), (rival, rival_ms, rival_layout) = row["plans"], row["rows"]
    return [
        *(row["case"], row["learned"], f"{row['longest']:,}", f"{ms:,.0f} ms ({layout})"),
        *(f"{rival_ms:,.0f} ms ({rival}, {rival_layout})", f"**{row['gain']:.2f}**"),
        *("–" if row["bridge"] is None else f"{row['bridge']:.2f}", f"{row['seconds']:.0f}", row["date"]),
    ]


def keep(row: dict[str, Any], folder: Path) -> None:
    """Put a row in place of an earlier one of the same case, or behind all."""
    path = folder / "gains.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    about = [[each[key] for key in ("case", "learned", "longest")] for each in (*rows, row)]
    rows[about.index(about[-1]) : about.index(about[-1]) + 1] = [row]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(COLUMNS, [cells(each) for each in rows]) + "\n")


if __name__ == "__main__":
    main()
