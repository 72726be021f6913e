"""Planned iterations over those of other packers, as `megatron-dynapipe compare` predicts them on A100 costs.

    python -m benchmarks.planning.rivals [--settings gpt:1,1,8 …] [--lengths 2048 8192]

Two batches of 65,536 tokens for each maximum length; the plan's layer split is chosen from the larger batches of the
same mixture and length. The others run equal layers with 1F1B, the fastest of every recompute mode, of sizes of rows an
eighth of the longest sample apart, and of their own and the planner's assignment to replicas. A line per setting and
length has the geometric mean of real tokens per second over each, and the least ratio of one batch over any.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import environment
from benchmarks.planning.cases import recorded_batches
from benchmarks.planning.full import arguments, split_from, write

RIVALS = ("packed_rows", "dp_balanced", "default_dynamic_cp", "verl", "slime")
SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "gpt:4,2,4", "t5:1,1,8", "t5:1,2,4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--lengths", nargs="*", type=int, default=(2048, 8192), help="maximum lengths of samples")
    args = parser.parse_args()
    every = recorded_batches()
    print("| setting | maximum | " + " | ".join(f"`{name}`" for name in RIVALS) + " | least |")
    print("|---" * (3 + len(RIVALS)) + "|")
    for setting in args.settings:
        model, _, layout = setting.partition(":")
        for length in args.lengths:
            over, least = _compared(model, layout, length, every)
            cells = [f"{over[name]:.3f}" if over.get(name) else "–" for name in RIVALS] + [f"{least:.3f}"]
            print(f"| {setting} | {length:,} | " + " | ".join(cells) + " |", flush=True)


def _compared(model: str, layout: str, length: int, every: list[dict]) -> tuple[dict[str, float], float]:
    """The plan's tokens per second over those of each other method: geometric means over the batches, and the least."""
    chosen = [b for b in every if b["model"] == model and b["max_seq_len"] == length and b["tokens"] == 65_536]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "batches.json", chosen)
        command = arguments("compare", model, layout, folder / "batches.json")
        command += split_from(folder / "split.json", model, length, every)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout)
    times = [{name: each["methods"][name].get("ms") for name in ("dynapipe", *RIVALS)} for each in found["batches"]]
    ratios = [ms[name] / ms["dynapipe"] for ms in times for name in RIVALS if ms[name] and ms["dynapipe"]]
    return found["methods"]["dynapipe"]["geomean_over"], min(ratios)


if __name__ == "__main__":
    main()
