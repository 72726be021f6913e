"""Costs of models' layers on this GPU, in bf16, as files that plans are made from.

    python benchmarks/gpu/measure.py --output FOLDER [--budget-s 240]
    python benchmarks/gpu/measure.py --output FOLDER --only t5_xxl               # the whole budget for this one
    python benchmarks/gpu/measure.py --device cpu --small --output FOLDER        # the same code paths without a GPU

Each model is measured by `megatron-dynapipe profile` in a process of its own, with Megatron's local layers and, where
it is installed, with Transformer Engine's, the most wanted first. Those that there is too little time for are left out
and named; the others share the time. The next process imports while one measures. Files are `DEVICE-MODEL[-te].json`;
`measure.json` says after each what came of it. One that fails, or does not end in time, keeps none of the others from
being measured. A file whose fit is poor is written all the same, for another look; it is not one to plan with.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

from benchmarks.common import ROOT, markdown, number, say
from benchmarks.gpu.machine import Processes, ProcessFailedError, provenance
from megatron_dynapipe.config import cluster_file
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.costing.format import read_file

WORKER = (sys.executable, "-m", "benchmarks.gpu.measure", "--worker")
LATE_S, LAST_S = 60.0, 15.0
"""What an item may take beyond its share, and the last one beyond the end: kernels are compiled, and the fewest points
measured, whatever the time. The next ones have less then."""
LEAST_S = 20.0
"""A share below which a measurement is not begun."""
POOR = 0.25
"""An error of nine tenths of the times above which a file is not to be planned with."""
ADAM_PARAMETERS, ADAM_S = 2**28, 60.0
"""Whose steps are timed by each fused Adam that is installed, and within what time."""
MEASURED, MEASURED_POORLY = "measured", "measured, a poor fit"
COLUMNS = ("costs", "outcome", "s", "points", "error of times, median", "nine tenths", "layer, ms at 2,048 positions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is measured.

    Attributes:
        model: its name in the file's.
        family: "gpt" or "t5".
        config: run file.
        wanted_s: seconds that a good fit takes, kernels compiled; also its share of the time, to those of the others.
        engine: with Transformer Engine's layers.
        vocabulary: tokens, if the run file does not say how many.
        recompute: modes of the layers.
    """

    model: str
    family: str
    config: str
    wanted_s: float
    engine: bool = False
    vocabulary: int = 0
    recompute: str = "none,selective,full"

    @property
    def name(self) -> str:
        """Of the file, after the device's."""
        return self.model + "-te" * self.engine


ITEMS = (
    Item(model="llama3_8b", family="gpt", config="llama_like_8b", wanted_s=55),
    Item(model="llama3_8b", family="gpt", config="llama_like_8b", wanted_s=55, engine=True),
    Item(model="t5_xxl", family="t5", config="t5_v1_1_xxl", wanted_s=150, vocabulary=32128, recompute="none,full"),
    Item(model="qwen2.5_7b", family="gpt", config="qwen_like_7b", wanted_s=55),
    Item(model="qwen2.5_7b", family="gpt", config="qwen_like_7b", wanted_s=55, engine=True),
)
"""The most wanted first.

A profile measures some points whatever its budget, since a file without them would be a guess: 88 of a GPT, and of a
T5, which has two kinds of layers, 190, or 134 without selective recomputation. It also compiles `flex_attention`.
"""
KERNELS = ("no-persist-layer-norm", "no-masked-softmax-fusion", "no-bias-dropout-fusion")
"""Switches of the run files that Transformer Engine's layers do without."""
TINY = "--hidden-size 64 --ffn-hidden-size 128 --seq-length 128 --max-position-embeddings 128 --global-batch-size 4"
TINY_OF = {
    "gpt": f"{TINY} --num-layers 2 --num-attention-heads 4 --num-query-groups 2 --padded-vocab-size 512",
    "t5": f"{TINY} --encoder-num-layers 2 --decoder-num-layers 2 --num-attention-heads 4 --kv-channels 16"
    " --decoder-seq-length 64",
}


def command(item: Item, output: Path, *, device: str, small: bool, seconds: float) -> list[str]:
    """Words of `megatron-dynapipe` that measure an item."""
    words = ["profile", "--model", item.family, "--output", str(output), "--budget-minutes", f"{seconds / 60:.4f}"]
    words += ["--recompute", item.recompute]
    words += ["--vocabulary", str(item.vocabulary)] if item.vocabulary else []
    words += ["--max-positions", "256"] if small else []
    words += ["--", "--dynapipe-config", str(ROOT / "configs" / f"{item.config}.yaml"), "--dynapipe-device", device]
    words += ["--pipeline-model-parallel-size", "1"]
    if item.engine:
        words += ["--transformer-impl", "transformer_engine"]
        words += [word for name in KERNELS for word in ("--dynapipe-unset", name)]
    return words + (TINY_OF[item.family].split() if small else [])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        measure_when_told(sys.argv[2])
        return
    if sys.argv[1:2] == ["--adam"]:
        print(json.dumps(adam_ms(sys.argv[2], int(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [item.name for item in ITEMS]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers of the same kinds")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for the files")
    parser.add_argument("--budget-s", type=float, default=240, help="seconds for all of them (%(default)g)")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME", help="of %(choices)s")
    options = parser.parse_args()
    end = time.monotonic() + options.budget_s
    origin = provenance(options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    items = [item for item in ITEMS if item.name in (options.only or names)]
    rows = [{"name": item.name, "outcome": "Transformer Engine is not installed"} for item in items if lacks(item)]
    items = [item for item in items if not lacks(item)]
    with tempfile.TemporaryDirectory() as logs:
        chosen = items
        if not options.only:
            origin["adam_ms"] = adam_of_each(options, Path(logs))
            chosen = fitting(items, end - time.monotonic()) if options.device == "cuda" else items
        missing = [item.name for item in items if item not in chosen]
        rows += [{"name": name, "outcome": f"no time left: --only {name}"} for name in missing]
        rows += measured(chosen, options, origin, end, Path(logs))
    write(options.output, origin, rows)
    print(markdown(COLUMNS, [cells(row) for row in rows]), flush=True)
    for row in rows:
        if row["outcome"] == MEASURED_POORLY:
            say(f"{row['name']}: {row['note']}")
    sys.exit(not any(row["outcome"] in (MEASURED, MEASURED_POORLY) for row in rows))


def adam_of_each(options: argparse.Namespace, logs: Path) -> dict[str, float] | str:
    """`adam_ms` in a process of its own; why there is none."""
    count = 10_000 if options.small else ADAM_PARAMETERS
    words = [sys.executable, "-m", "benchmarks.gpu.measure", "--adam", options.device, str(count)]
    process = Processes([words], environments=[{"OMP_NUM_THREADS": "1"}], log=logs / "adam")
    try:
        process.wait(time.monotonic() + ADAM_S)
        found: dict[str, float] = json.loads(process.outputs()[0].splitlines()[-1])
    except (ProcessFailedError, ValueError, IndexError) as failure:
        return str(failure)[-1000:]
    say(f"Adam's steps of {count:,} parameters, ms: {found}")
    return found


def adam_ms(device: str, count: int) -> dict[str, float]:
    """ms of a step of so many fp32 parameters, by each fused Adam there is: the least of some."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = {}
    for name, make in _adams().items():
        parameters = [torch.nn.Parameter(torch.randn(count // 16, device=device)) for _ in range(16)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer, times = make(parameters), []
        for _ in range(6):
            synchronize()
            began = time.perf_counter()
            optimizer.step()
            synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        found[name] = round(min(times), 3)
    return found


def _adams() -> dict[str, Any]:
    import torch

    adams: dict[str, Any] = {"PyTorch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)}
    for name, module in (("Transformer Engine", "transformer_engine.pytorch.optimizers"), ("apex", "apex.optimizers")):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            with contextlib.suppress(ImportError):
                fused = importlib.import_module(module).FusedAdam
                adams[name] = lambda parameters, fused=fused: fused(parameters, lr=1e-4)
    return adams


def fitting(items: Sequence[Item], seconds: float) -> list[Item]:
    """Those that there is time for, in their order."""
    chosen = []
    for item in items:
        if item.wanted_s <= seconds:
            chosen.append(item)
            seconds -= item.wanted_s
    return chosen


def lacks(item: Item) -> bool:
    """Whether an item wants Transformer Engine, and there is none."""
    return item.engine and importlib.util.find_spec("transformer_engine") is None


def measured(
    items: Sequence[Item], options: argparse.Namespace, origin: dict[str, Any], end: float, logs: Path
) -> list[dict[str, Any]]:
    """What became of each item, which is written and said at once.

    Args:
        items: in their order.
        options: of the command line.
        origin: what figures depend on.
        end: on the monotonic clock, of all of them.
        logs: folder for what processes say.
    """
    device = str(origin["device"])
    prefix = cluster_file(device, of_kind=True) or device.lower().replace(" ", "_")
    rows: list[dict[str, Any]] = []
    waiting: Processes | None = None
    for place, item in enumerate(items):
        process = waiting or _started(options.device, logs / str(place))
        waiting = _started(options.device, logs / str(place + 1)) if place + 1 < len(items) else None
        seconds = (end - time.monotonic()) * item.wanted_s / sum(later.wanted_s for later in items[place:])
        row = {"name": f"{prefix}-{item.name}", "model": item.name, "outcome": "no time left"}
        if seconds < (LEAST_S if options.device == "cuda" else 0):
            process.kill()
        else:
            say(f"{row['name']}: {seconds:.0f} s")
            row |= _measured_one(item, row["name"], process, options, seconds, end)
        rows.append(row)
        say(f"{row['name']}: {row['outcome']}")
        write(options.output, origin, rows)
    return rows


def _started(device: str, log: Path) -> Processes:
    return Processes([[*WORKER, device]], environments=[{"OMP_NUM_THREADS": "1"}], log=log)


def _measured_one(
    item: Item, name: str, process: Processes, options: argparse.Namespace, seconds: float, end: float
) -> dict[str, Any]:
    """What became of an item whose process waits for its order."""
    began, output = time.monotonic(), options.output / f"{name}.json"
    words = command(item, output, device=options.device, small=options.small, seconds=seconds)
    try:
        process.tell(json.dumps(words).encode())
        process.wait(min(began + seconds + LATE_S, end + (LAST_S if options.device == "cuda" else LATE_S)))
        return {"seconds": round(time.monotonic() - began, 1)} | verdict(item, figures(output))
    except (ProcessFailedError, DynaPipeError, OSError) as failure:
        return {"outcome": "failed", "seconds": round(time.monotonic() - began, 1), "note": str(failure)[-3000:]}


def verdict(item: Item, found: dict[str, Any]) -> dict[str, Any]:
    """Figures of a file with its outcome, and why it is not to be planned with if it is not."""
    error = found["error"]["p90"]
    if error is not None and error <= POOR:
        return found | {"outcome": MEASURED}
    known = "it is not known how good its fit is"
    if error is not None:
        known = f"nine tenths of times are predicted within {error:.1%}"
    note = f"{known}, wanted within {POOR:.0%}: do not plan with this file, measure longer (--only {item.name})"
    return found | {"outcome": MEASURED_POORLY, "note": note}


def figures(path: Path) -> dict[str, Any]:
    """What is told of a cost file: its fit's errors, its points, and a layer's time."""
    file, _ = read_file(path)
    entry = file.keys["tp1_none"]
    error = {name: file.provenance.get(f"cross_validated_time_ms_{name}") for name in ("median", "p90")}
    times = [entry.time_ms[f"encoder.{way}"] for way in ("forward", "backward")]
    at = min(times[0], key=lambda length: abs(int(length) - 2048))
    layer = sum(dict(table[at])[min(size for size, _ in table[at])] for table in times)
    points = sum(len(rows) for table in entry.evidence.time_ms.values() for rows in table.values())
    return {"error": error, "layer_ms": layer, "layer_at": int(at), "points": points, "bytes": path.stat().st_size}


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table."""
    error = row.get("error") or {}
    both = [number(error.get(name), "{:.1%}") for name in ("median", "p90")]
    layer = number(row.get("layer_ms"), "{:.3f}") + (f" at {row['layer_at']:,}" if row.get("layer_at") else "")
    return [row["name"], row["outcome"], number(row.get("seconds")), number(row.get("points")), *both, layer]


def write(folder: Path, origin: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write what is known so far."""
    report = {"format": "dynapipe-gpu-costs/1", **origin, "costs": list(rows)}
    part = folder / "measure.json.part"
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(folder / "measure.json")


def measure_when_told(device: str) -> None:
    """Import, then carry out one `profile`, whose words come as a line of JSON."""
    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable(device)  # before Megatron is imported
    from megatron_dynapipe.cli.main import main as command_line
    from megatron_dynapipe.megatron.profiling import command as _imported  # noqa: F401  # while another measures

    if line := sys.stdin.readline():
        sys.exit(command_line(json.loads(line)))


if __name__ == "__main__":
    main()
