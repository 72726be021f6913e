"""Planned iterations over those of other packers, as `megatron-dynapipe compare` predicts them on A100 costs.

    python -m benchmarks.planning.rivals [--settings gpt:1,1,8 …] [--lengths 2048 8192]

Two batches of 65,536 tokens for each maximum length; the plan's layer split is chosen from the larger batches of the
same mixture and length. The others run equal layers with 1F1B, the fastest of every recompute mode, of sizes of rows an
eighth of the longest sample apart, and of their own and the planner's assignment to replicas. A line per setting and
length has the geometric mean of real tokens per second over each, and the least ratio of one batch over any.
"""

import argparse

from benchmarks.planning.cases import recorded_batches
from benchmarks.planning.full import answer

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
        for length in args.lengths:
            over, least = _compared(setting, length, every)
            cells = [f"{over[name]:.3f}" if over.get(name) else "–" for name in RIVALS] + [f"{least:.3f}"]
            print(f"| {setting} | {length:,} | " + " | ".join(cells) + " |", flush=True)


def _compared(setting: str, length: int, every: list[dict]) -> tuple[dict[str, float], float]:
    """The plan's tokens per second over those of each other method: geometric means over the batches, and the least."""
    of_model = [b for b in every if b["model"] == setting.partition(":")[0] and b["max_seq_len"] == length]
    chosen = [b for b in of_model if b["tokens"] == 65_536]
    compared = answer("compare", setting, chosen, length, every)
    times = [{name: of["methods"][name].get("ms") for name in ("dynapipe", *RIVALS)} for of in compared["batches"]]
    ratios = [ms[name] / ms["dynapipe"] for ms in times for name in RIVALS if ms[name] and ms["dynapipe"]]
    return compared["methods"]["dynapipe"]["geomean_over"], min(ratios)


if __name__ == "__main__":
    main()
