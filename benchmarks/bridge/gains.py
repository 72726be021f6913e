"""What plans gain in a recipe of Megatron-Bridge over other trainers' packed rows, by the independent scorer.

    python -m benchmarks.bridge.gains [--lengths 2048 8192] [--learned everything targets]

A GPT of 7B on eight H100s, eight pipeline stages, batches of 65,536 tokens. A recipe that is equipped takes what
plans offer: padded and packed rows, pieces, divided passes, heads over labels. `planned(config)` chooses its layers and
virtual stages from the first batches, here those of flan_like (of sft_like, where targets alone are learned); the
held-out ones are planned so, and on the recipe's own equal stages (`layers="recipe"`). `score_plans.py` rebuilds the
times of plans. Rows of other trainers take what `compare` predicts: the fastest rule, size of rows and recompute mode,

    by work     of one virtual stage, 5,5,4,4,4,4,4,2
    any         of every pipeline that can be set up by hand, with 1, 2 and 4 virtual stages
    own         of the recipe's own stages, beside plans on the same stages
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, markdown
from benchmarks.planning.cases import COSTS, MEMORY_MB, recorded_batches
from benchmarks.planning.full import MODELS, arguments, write
from megatron_dynapipe.tools.rivals.methods import TRAINERS

EVERYTHING, TARGETS = "everything", "targets"
LAYOUT = "1,1,8"
SCORER = ROOT / "benchmarks/planning/score_plans.py"
OWN = ("--layers-per-stage", "equal", "--virtual-stages", "1")
"""Of a recipe: equal stages, one on each rank."""
BY_WORK = ("--layers-per-stage", "5,5,4,4,4,4,4,2")
COLUMNS = ("learned", "longest", "batches", "layers", "ms", "by work", "worst", "any", "worst")
COLUMNS += ("own stages, ms", "own", "worst", "date")


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=(2048, 8192), help="maximum lengths of samples")
    parser.add_argument("--learned", nargs="*", choices=(EVERYTHING, TARGETS), default=(EVERYTHING, TARGETS))
    args = parser.parse_args()
    print(markdown(COLUMNS, []), flush=True)
    for learned in args.learned:
        for length in args.lengths:
            print("| " + " | ".join(row(learned, length)) + " |", flush=True)


def row(learned: str, length: int) -> tuple[str, ...]:
    """The cells of a case."""
    first, held_out = batches_of(learned, length)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "first.json", first)
        write(folder / "batches.json", held_out)
        chosen = ("--layers-per-stage", "auto", "--split-from", str(folder / "first.json"))
        plans, layers = scored(folder, chosen)
        cells = [layers, f"{statistics.fmean(plans):.0f}"]
        cells += [cell for rows in (BY_WORK, chosen) for cell in gain(plans, fastest_rows(folder, rows))]
        own, _ = scored(folder, OWN)
        cells += [f"{statistics.fmean(own):.0f}", *gain(own, fastest_rows(folder, OWN))]
    return learned, f"{length:,}", str(len(held_out)), *cells, time.strftime("%Y-%m-%d")


def gain(plans: Sequence[float], rows: Sequence[float]) -> tuple[str, str]:
    """The geometric mean of what plans gain over rows, batch by batch, and the least."""
    gains = [theirs / ours for ours, theirs in zip(plans, rows, strict=True)]
    return f"**{statistics.geometric_mean(gains):.3f}**", f"{min(gains):.3f}"


def batches_of(learned: str, length: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The first batches, from which layers are chosen, and those that are held out."""
    asked = {"model": "gpt", "max_seq_len": length, "tokens": 65_536}
    found = {
        name: [batch for batch in recorded_batches(name) if batch.items() >= asked.items()]
        for name in ("flan_like", "flan_more", "sft_like")
    }
    if learned == TARGETS:
        first, *held_out = found["sft_like"]
        return [first], held_out
    unlabelled = [{key: batch[key] for key in batch if key != "labels"} for batch in found["sft_like"]]
    return found["flan_like"], found["flan_more"] + unlabelled


def scored(folder: Path, layers: Sequence[str]) -> tuple[list[float], str]:
    """Milliseconds of every held-out batch's plan, as the scorer rebuilds them, and the layers of its stages."""
    words = [*arguments("plan", "gpt", LAYOUT, folder / "batches.json", "h100"), *layers]
    words += ["--layout", "auto", "--slices", "auto", "--split-backward", "auto"]
    planned = _printed(words)
    (folder / "report.json").write_text(planned)
    split = json.loads(planned)["iterations"][0]["replicas"][0]["layers_per_stage"]
    of_model, hidden = MODELS["gpt"]
    data, tensor, pipeline = LAYOUT.split(",")
    words = [sys.executable, str(SCORER), str(folder / "report.json"), str(folder / "batches.json")]
    words += [str(COSTS["h100"]["gpt"]), "--model", "gpt", *of_model.split(), "--hidden", hidden, "--split", "auto"]
    words += ["--dp", data, "--tp", tensor, "--pp", pipeline, "--memory-mb", str(MEMORY_MB["h100"])]
    lines = [json.loads(line) for line in _printed(words).splitlines() if line.startswith("{")]
    return [line["ms"] for line in lines], ",".join(f"{layers:g}" for layers in split)


def fastest_rows(folder: Path, layers: Sequence[str]) -> list[float]:
    """Milliseconds of every batch in the fastest of other trainers' rows."""
    words = [*arguments("compare", "gpt", LAYOUT, folder / "batches.json", "h100"), *layers]
    compared = json.loads(_printed(words))["batches"]
    predicted = [[batch["methods"][name].get("ms") for name in TRAINERS] for batch in compared]
    return [min(ms for ms in found if ms) for found in predicted]


def _printed(words: Sequence[str]) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return done.stdout


if __name__ == "__main__":
    main()
