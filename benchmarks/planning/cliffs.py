"""Plans that are slower than a simpler setting makes them: the public batches in less memory, and with fewer choices.

    python -m benchmarks.planning.cliffs DATA [--batches gpt-s8192 …] [--settings 1,1,8 1,2,4] [--costs … --memory 18]

DATA is that of `recorded.py`; a GPT of 7B, at 17 limits, 1 GB apart. For each batch the most that a plan takes over one
in less memory, and over each simpler setting at the seventh; and the median and the most processor seconds of a plan.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.planning.recorded import BOTH, GB, MODELS, PACKED, _settings, batches, cost_model, half_layers
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.settings import PlannerSettings

EVERYTHING = {"micro_batch_layouts": BOTH, "slices": "auto", "split_backward": "auto"}
SIMPLER: dict[str, dict[str, Any]] = {
    **{f"slices {most}": {"slices": most} for most in ("off", 512, 1024, 2048)},
    "whole passes": {"split_backward": "off"},
    "packed": {"micro_batch_layouts": PACKED},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--batches", nargs="*", default=["gpt-s8192", "gpt-s4096", "gpt-s2048"], help="begin with")
    parser.add_argument("--settings", nargs="*", default=["1,1,8", "1,2,4"], help="data,tensor,pipeline parallel")
    parser.add_argument("--costs", default=MODELS[0].costs, choices=[MODELS[0].costs, MODELS[2].costs])
    parser.add_argument("--memory", type=int, default=30, help="the least, in GB")
    args = parser.parse_args()
    (model,) = (model for model in MODELS if model.costs == args.costs)
    for setting in args.settings:
        layout = tuple(map(int, setting.split(",")))
        usual = _settings(model, layout, args.memory + 6, EVERYTHING | {"layers_per_stage": "halves"}, ())
        usual = usual.with_layers_per_stage(half_layers(32, layout[2]))
        for name in batches(args.data):
            if "t65536" in name and name.startswith(tuple(args.batches)):
                print(f"{setting} {name}: {line(usual, name, model.costs, args.data)}", flush=True)


def line(usual: PlannerSettings, name: str, costs: str, data: Path) -> str:
    """What one batch comes to."""
    seconds: list[float] = []

    def planned(**changes: Any) -> float:
        settings = msgspec.structs.replace(usual, **changes)
        began = time.process_time()
        try:
            plan = planner_of(settings, cost_model(costs, data)).plan(batches(data)[name], 0)
        except PlanningError:
            return float("inf")
        seconds.append(time.process_time() - began)
        return plan.totals.predicted_ns

    times = [planned(memory_limit_bytes=usual.memory_limit_bytes + more * GB) for more in range(-6, 11)]
    over = {"less memory": max(t / min(times[: at + 1]) for at, t in enumerate(times) if min(times[: at + 1]) < 1e18)}
    over |= {simpler: times[6] / planned(**changes) for simpler, changes in SIMPLER.items()}
    ratios = ", ".join(f"{simpler} {ratio:.3f}" for simpler, ratio in over.items())
    return f"{ratios}; {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"


if __name__ == "__main__":
    main()
