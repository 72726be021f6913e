"""Planned iterations over those of other trainers' packing, as `megatron-dynapipe compare` predicts them.

    python -m benchmarks.planning.rivals [--devices a100 h100] [--settings gpt:1,1,8 …] [--lengths 2048 8192] [--labels]

All batches of 65,536 tokens of a maximum length. The plan's layers and virtual stages are chosen once, from the first
batches, as in training. The others run the fastest for each batch of 1, 2 and 4 virtual stages (1F1B, interleaved),
equal layers and whole ones by work, every recompute mode and sizes of rows an eighth of the longest sample apart. A
line per setting and length has the geometric mean of real tokens per second over each, and over the fastest of each
batch the mean and the worst. With --labels the batches of sft_like alone, whose plans leave out what does not count;
the others run all of it.
"""

import argparse
import math
import statistics

from benchmarks.planning.cases import COSTS, recorded_batches
from benchmarks.planning.full import answer
from megatron_dynapipe.tools.rivals.methods import TRAINERS

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "gpt:4,2,4", "t5:1,1,8", "t5:1,2,4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="*", choices=COSTS, default=tuple(COSTS), help="whose costs")
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--lengths", nargs="*", type=int, default=(2048, 8192), help="maximum lengths of samples")
    parser.add_argument("--labels", action="store_true", help="batches of which some positions do not count")
    args = parser.parse_args()
    names = ("sft_like",) if args.labels else ("flan_like", "flan_more", "sft_like")
    unasked = () if args.labels else ("labels",)
    every = [{key: b[key] for key in b if key not in unasked} for name in names for b in recorded_batches(name)]
    columns = ["costs", "setting", "maximum", "batches", *(f"`{name}`" for name in TRAINERS), "**fastest**", "worst"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for device in args.devices:
        for setting in args.settings:
            for length in args.lengths:
                asked = {"model": setting.partition(":")[0].partition("-")[0], "max_seq_len": length, "tokens": 65_536}
                chosen = [batch for batch in every if batch.items() >= asked.items()]
                print(f"| {device} | {setting} | {length:,} | {_row(device, setting, length, chosen)} |", flush=True)


def _row(device: str, setting: str, length: int, batches: list[dict]) -> str:
    """Cells: batches, the plan's tokens per second over those of each other method, and over the fastest."""
    compared = answer("compare", setting, batches, length, [], device)
    times = [{name: of["methods"][name].get("ms") for name in ("dynapipe", *TRAINERS)} for of in compared["batches"]]
    ratios = [
        min(ms[name] for name in TRAINERS if ms[name]) / ms["dynapipe"]
        for ms in times
        if ms["dynapipe"] and any(ms[name] for name in TRAINERS)
    ]
    mean = statistics.geometric_mean(ratios or [math.nan])
    over = compared["methods"]["dynapipe"]["geomean_over"]
    cells = [f"{over[name]:.3f}" if over.get(name) else "–" for name in TRAINERS]
    return " | ".join([f"{len(ratios)}", *cells, f"**{mean:.3f}**", f"{min(ratios, default=math.nan):.3f}"])


if __name__ == "__main__":
    main()
