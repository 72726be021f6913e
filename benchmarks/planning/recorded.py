"""Plans of 200 settings compared with recorded ones, so that a change of the planner or of costs shows what it changes.

    python -m benchmarks.planning.recorded DATA [--write] [--only TEXT] [--follow] [--verbose]

DATA is a folder with `a100/` and `h100/` (cost files) and `batches/flan_like.json`. Every case plans one batch; its
digest and predicted time lie in `recorded_plans.json`, which `--write` makes anew. Printed are how many plans are the
same bytes, the ratio of predicted times (geometric mean, least, most), the cases whose time changed, and the
processor time of a plan (median, nine tenths, most, sum). With `--follow` every plan follows those of three other
batches of its kind (`batches/flan_more.json`), as the plans of a run follow its first ones, whose time does not count.
"""

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import markdown
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.choosing.precedents import precedents_of
from megatron_dynapipe.core.errors import PlanError, PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    AnalyticCostModel,
    CostModel,
    Experts,
    ModelShape,
    TableCostModel,
    model_of_layers,
)
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import digest

RECORDED = Path(__file__).with_name("recorded_plans.json")
GB = 10**9
PADDED, PACKED, BOTH = (BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)
LAYOUTS = ((1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 4, 2))
MODES = (tuple(Recompute), (Recompute.NONE,), (Recompute.SELECTIVE, Recompute.FULL))


class Model(NamedTuple):
    """A model whose batches are planned.

    Attributes:
        costs: a file under DATA, or the name of an analytic model.
        family, encoder_layers, decoder_layers, hidden_size: of the model.
        memory_gb: limits of a device that cases take in turn.
        layouts: (data, tensor, pipeline) parallel sizes.
        lengths: the longest samples of batches that cases take in turn.
        fixed: settings of all its cases.
    """

    costs: str
    family: ModelFamily
    encoder_layers: int
    decoder_layers: int
    hidden_size: int
    memory_gb: tuple[int, ...]
    layouts: tuple[tuple[int, int, int], ...] = LAYOUTS
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    fixed: Mapping[str, Any] = MappingProxyType({})


GPT, T5 = ModelFamily.GPT, ModelFamily.T5
SHAPE = {"hidden": 1024, "heads": 16, "kv_channels": 64, "ffn": 4096, "vocabulary": 32_000}
SOME_EXPERTS = tuple(range(1, 16, 2))
SHAPES = {
    "gpt": ModelShape(family=GPT, **SHAPE),
    "t5": ModelShape(family=T5, **SHAPE, relative_buckets=32),
    "experts": ModelShape(family=GPT, **SHAPE, experts=Experts(count=8, per_token=2, ffn=2048)),
    "some": ModelShape(family=GPT, **SHAPE, experts=Experts(count=8, per_token=2, ffn=2048, layers=SOME_EXPERTS)),
}
MODELS = (
    Model("a100/gpt_6.7b.json", GPT, 32, 0, 4096, (36, 30, 40)),
    Model("a100/t5_11b.json", T5, 24, 24, 1024, (36, 40, 48), lengths=(512, 1024, 2048, 4096)),
    Model("h100/gpt_7b.json", GPT, 32, 0, 4096, (72, 50, 40), LAYOUTS[:3]),
    Model("h100/t5_xxl.json", T5, 24, 24, 4096, (72, 60), LAYOUTS[:3]),
    Model("gpt", GPT, 16, 0, 1024, (24, 12), ((1, 1, 4),)),
    Model("t5", T5, 8, 8, 1024, (24, 12), ((2, 1, 4),)),
    Model("experts", GPT, 16, 0, 1024, (40, 30), ((2, 1, 4), (2, 1, 2)), fixed={"expert_parallel": 2}),
    Model(
        "some", GPT, 16, 0, 1024, (40, 30), ((2, 1, 4),), fixed={"expert_parallel": 2, "expert_layers": SOME_EXPERTS}
    ),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_layouts": PADDED},
    "packed": {"micro_batch_layouts": PACKED},
    "both": {"micro_batch_layouts": BOTH},
    "halves": {"micro_batch_layouts": BOTH, "layers_per_stage": "halves"},
    "padded halves": {"micro_batch_layouts": PADDED, "layers_per_stage": "halves"},
    "chunks": {"micro_batch_layouts": BOTH, "chunks": 2},
    "divided": {"micro_batch_layouts": BOTH, "split_backward": "auto"},
    "divided halves": {"micro_batch_layouts": BOTH, "layers_per_stage": "halves", "split_backward": "on"},
    "one mode": {"micro_batch_layouts": BOTH, "layers_per_stage": "halves", "recompute": "one"},
    "pieces": {"micro_batch_layouts": BOTH, "slices": "auto"},
    "short pieces": {"micro_batch_layouts": BOTH, "slices": 512},
    "everything": {
        "micro_batch_layouts": BOTH,
        "layers_per_stage": "halves",
        "split_backward": "auto",
        "slices": "auto",
        "chunks": 2,
    },
}
CASES = 200


class Case(NamedTuple):
    """One batch under one setting."""

    name: str
    model: Model
    settings: PlannerSettings
    batch: str


def cases() -> Iterator[Case]:
    """All cases: for every model and layout all variants that it has, with batches and memory limits in turn."""
    turn = itertools.count()
    for model in MODELS:
        for layout, (variant, changes) in itertools.product(model.layouts, VARIANTS.items()):
            if "slices" in changes and (model.family is T5 or "expert_layers" in model.fixed):
                continue
            number = next(turn)
            memory, longest = (values[number % len(values)] for values in (model.memory_gb, model.lengths))
            batch = f"{model.family}-s{longest}-t65536-b{number % 2}"
            settings = _settings(model, layout, memory, changes, MODES[number % len(MODES)])
            yield Case(f"{model.costs} {layout} {variant} {memory} GB {longest}", model, settings, batch)


def _settings(
    model: Model, layout: tuple[int, int, int], memory: int, changes: dict[str, Any], modes: tuple[Recompute, ...]
) -> PlannerSettings:
    data, tensor, pipeline = layout
    values = {**changes, **model.fixed}
    expert_layers = values.pop("expert_layers", ())
    stacks = model_of_layers(model.family, model.encoder_layers, model.decoder_layers, expert_layers=expert_layers)
    if values.pop("layers_per_stage", None):
        split = half_layers(stacks.layers, pipeline * changes.get("chunks", 1))
        values["modules_per_stage"] = stacks.modules_of(split)
    if values.pop("recompute", None):
        values["recompute"] = modes[:1]
    return PlannerSettings(
        model=stacks,
        hidden_size=model.hidden_size,
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        memory_limit_bytes=memory * GB,
        distributed_optimizer=True,
        **values,
    )


def half_layers(layers: int, stages: int) -> tuple[float, ...]:
    """An uneven split in which the first stages end within a layer, and the last stage has the least."""
    even = layers / stages
    moved = [0.5 if stage < stages - 1 else -0.5 * (stages - 1) for stage in range(stages)]
    if moved[-1] + even < 1:
        moved = [0.5, *[0.0] * (stages - 2), -0.5]
    return tuple(int(n) if n % 1 == 0 else n for n in (even + more for more in moved))


class Outcome(NamedTuple):
    """What a case came to: a plan's digest, its settings' left out, and its predicted time; without one, why, and 0."""

    digest: str
    predicted_ns: int


def run(case: Case, data: Path, *, follow: bool) -> tuple[Outcome, float]:
    """Plan a case; also the seconds of processor time of the plan."""
    lengths = batches(data)[case.batch]
    try:
        planner = planner_of(case.settings, cost_model(case.model.costs, data))
        if follow:
            kind = case.batch.rpartition("-")[0]
            others = [batch for name, batch in batches(data, "flan_more").items() if name.startswith(kind)]
            planner = planner.changed(precedents=precedents_of(planner, others))
        began = time.process_time()
        plan = planner.plan(lengths, 0)
        seconds = time.process_time() - began
    except (PlanningError, PlanError) as error:
        return Outcome(f"{type(error).__name__}: {str(error)[:60]}", 0), 0.0
    return Outcome(digest(msgspec.structs.replace(plan, settings_digest="")), plan.totals.predicted_ns), seconds


@functools.cache
def batches(data: Path, mixture: str = "flan_like") -> dict[str, GlobalBatch]:
    """The recorded batches by their ids."""
    every = json.loads((data / f"batches/{mixture}.json").read_text())["batches"]
    return {batch["id"]: GlobalBatch.of_lengths(batch["input"], batch.get("target") or 0) for batch in every}


@functools.cache
def cost_model(name: str, data: Path) -> CostModel:
    """A file's costs, or an analytic model's."""
    if name.endswith(".json"):
        return TableCostModel.load(data / name)
    return AnalyticCostModel(SHAPES[name], A100_RATES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true", help="record what is planned now")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--follow", action="store_true", help="follow plans of three other batches")
    parser.add_argument("--verbose", action="store_true", help="every case")
    args = parser.parse_args()
    chosen = [case for case in itertools.islice(cases(), CASES) if args.only in case.name]
    outcomes, seconds = {}, []
    for case in chosen:
        outcomes[case.name], its_seconds = run(case, args.data, follow=args.follow)
        seconds.append(its_seconds)
    if args.write:
        lines = [f"{json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in outcomes.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    compare(
        outcomes,
        seconds,
        {name: Outcome(*outcome) for name, outcome in json.loads(RECORDED.read_text()).items()},
        args.verbose,
    )


def compare(outcomes: dict[str, Outcome], seconds: list[float], recorded: dict[str, Outcome], verbose: bool) -> None:
    """Print what differs from the record."""
    planned = [name for name, outcome in outcomes.items() if outcome.predicted_ns and recorded[name].predicted_ns]
    ratios = {name: outcomes[name].predicted_ns / recorded[name].predicted_ns for name in planned}
    same = sum(outcome == recorded[name] for name, outcome in outcomes.items())
    print(f"{same} of {len(outcomes)} as recorded, {len(planned)} of them with a plan", end="")
    if ratios:
        mean, least, most = statistics.geometric_mean(ratios.values()), min(ratios.values()), max(ratios.values())
        print(f"; predicted times over those recorded {mean:.5f} ({least:.5f} to {most:.5f})")
    nine_tenths = statistics.quantiles(seconds, n=10)[-1] if len(seconds) > 1 else seconds[0]
    print(
        f"processor time of a plan: median {statistics.median(seconds):.3f} s, nine tenths {nine_tenths:.3f} s,"
        f" most {max(seconds):.3f} s, sum {sum(seconds):.1f} s"
    )
    changed = [
        (
            name,
            *(f"{which.predicted_ns / 1e6:,.3f}" for which in (recorded[name], outcome)),
            f"{ratios[name]:.5f}" if name in ratios else outcome.digest,
        )
        for name, outcome in outcomes.items()
        if verbose or outcome != recorded[name]
    ]
    if changed:
        print(markdown(("case", "recorded ms", "ms", "ratio"), changed))


if __name__ == "__main__":
    main()
