"""Plans of an iteration for `stages.py`: the planner's, and that of the fastest packed rows. Imports no torch.

    python -m benchmarks.gpu.planned CASE.json METHOD OUTPUT

The planner's is made with the layer split and virtual stages that it chooses for the batch. Of the rows of other
trainers (`megatron_dynapipe/tools/rivals`) that one counts which is predicted fastest: of every rule, pipeline (equal
layers and layers by work, 1, 2 and 4 virtual stages), size of rows and mode of recomputation.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from benchmarks.planning.cases import recorded_batches
from megatron_dynapipe import config
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli.main import build_parser
from megatron_dynapipe.cli.planning_arguments import costs_and_settings
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.network import GLOO_RULES, MANY_QUEUES_RULES
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import decode_plan, encode
from megatron_dynapipe.tools.rivals.methods import TRAINERS, Longest, method_settings
from megatron_dynapipe.tools.rivals.pipelines import by_hand

PLANNED, ROWS = "planned", "rows"
METHODS = (PLANNED, ROWS)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a pipeline, and a global batch.

    Attributes:
        name: of the model.
        family: kind of model.
        run_file: of the model, from which plans and layers are made.
        batch: `{"input": […], "target": […]}`, lengths in tokens as in a batches file.
        longest: tokens of the longest sample that there may be, and of the longest target.
        stages: of the pipeline.
        vocabulary: tokens.
        costs: a cost model file, or "analytic".
        cluster: of `configs/clusters`.
        device: "cpu" or "cuda".
    """

    name: str
    family: ModelFamily
    run_file: str
    batch: dict[str, list[int]]
    longest: tuple[int, int]
    stages: int
    vocabulary: int
    costs: str
    cluster: str
    device: str

    @property
    def title(self) -> str:
        """As tables say it."""
        return f"{self.name}, {self.stages} stages"

    @property
    def lengths(self) -> GlobalBatch:
        """The batch."""
        return GlobalBatch.of_lengths(self.batch["input"], self.batch.get("target", 0), iteration=0)

    @property
    def flags(self) -> list[str]:
        """Of a run of it."""
        return ["--dynapipe-config", self.run_file, "--dynapipe-device", self.device]


class Planned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case's plan by a method, as files hold it.

    Attributes:
        how: of rows: whose rule.
        settings: that the plan was made with.
        plan: path of the encoded plan.
    """

    case: Case
    method: str
    how: str
    settings: PlannerSettings
    plan: str

    def load(self) -> IterationPlan:
        """The plan."""
        return decode_plan(Path(self.plan).read_bytes())


def cases(folder: Path, device: str, costs: dict[str, str], *, small: bool, flags: dict[str, Any]) -> list[Case]:
    """What is compared, the most wanted first.

    Args:
        folder: for run files.
        device: "cpu" or "cuda".
        costs: of a model by its name; computed ones of those that are missing.
        small: tiny models of the same kinds.
        flags: of every run, besides those of its file.
    """
    chosen = SMALL if small else LARGE
    made = []
    for name, file, stages, changes, batch_id, vocabulary in chosen:
        loaded: dict[str, Any] = config.read(ROOT / "configs" / f"{file}.yaml")
        loaded |= {"padded-vocab-size": vocabulary, **changes, **flags}
        run_file = folder / f"{name}-{stages}.yaml"
        run_file.write_text(yaml.safe_dump(loaded))
        batch = next(b for m in ("flan_more", "sft_like") for b in recorded_batches(m) if b["id"] == batch_id)
        family = ModelFamily(batch["model"])
        longest = (
            int(loaded["seq-length"]) + (family is ModelFamily.GPT),
            int(loaded.get("decoder-seq-length", 2)) - 2,
        )
        lengths = [
            [min(tokens, most) for tokens in batch[side]]
            for side, most in zip(("input", "target"), longest, strict=True)
            if side in batch
        ]
        if small:
            lengths = [side[:SMALL_SAMPLES] for side in lengths]
        made.append(
            Case(
                name=name,
                family=family,
                run_file=str(run_file),
                batch=dict(zip(("input", "target"), lengths, strict=False)),
                longest=longest,
                stages=stages,
                vocabulary=vocabulary,
                costs=costs.get(name, "analytic"),
                cluster="h100_80gb",
                device=device,
            )
        )
    return made


ROOT = Path(__file__).resolve().parents[2]
_LLAMA, _T5 = ("llama3_8b", "llama_like_8b"), ("t5_xxl", "t5_v1_1_xxl")
_2048 = {"seq-length": 2048, "max-position-embeddings": 2048}
LARGE: tuple[tuple[str, str, int, dict[str, Any], str, int], ...] = (
    # name, run file, stages, changes, batch, vocabulary
    (*_LLAMA, 4, _2048, "sft-s2048-t65536-b0", 128_256),
    (*_LLAMA, 8, _2048, "sft-s2048-t65536-b0", 128_256),
    (*_T5, 8, {"decoder-seq-length": 640}, "t5-s2048-t65536-c0", 32_128),
)
_TINY = {"hidden-size": 128, "ffn-hidden-size": 384, "num-attention-heads": 4, "bf16": False}
_TINY_GPT = {**_TINY, "num-layers": 8, "num-query-groups": 2, "padded-vocab-size": 2048}
_TINY_T5 = {**_TINY, "encoder-num-layers": 4, "decoder-num-layers": 4, "kv-channels": 32}
_SHORT = {"seq-length": 192, "max-position-embeddings": 192}
SMALL: tuple[tuple[str, str, int, dict[str, Any], str, int], ...] = (
    (*_LLAMA, 2, {**_TINY_GPT, **_SHORT}, "sft-s2048-t65536-b0", 2048),
    (*_LLAMA, 4, {**_TINY_GPT, **_SHORT}, "sft-s2048-t65536-b0", 2048),
    (*_T5, 2, {**_TINY_T5, **_SHORT, "decoder-seq-length": 48}, "t5-s512-t65536-c0", 2048),
)
SMALL_SAMPLES = 32


def planned(case: Case, method: str, folder: Path) -> Planned:
    """Plan a case by a method; raises PlanningError where that cannot be."""
    file = folder / "batches.json"
    batch = {"id": "batch", "model": case.family.value, **case.batch}
    file.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [batch]}))
    words = ["plan", "--model-config", case.run_file, "--cost-model", case.costs, "--cluster", case.cluster]
    words += ["--pipeline-parallel", str(case.stages), "--batches", str(file)]
    words += ["--layer-split", "auto"] if method == PLANNED else ["--layer-split", "equal", "--virtual-stages", "1"]
    cost_model, settings = costs_and_settings(build_parser("plan").parse_args(words))
    element = 2 if config.read(Path(case.run_file)).get("bf16") else 4
    rules = MANY_QUEUES_RULES if case.device == "cuda" else GLOO_RULES
    settings = msgspec.structs.replace(settings, transfers=rules, element_bytes=element)
    if method == PLANNED:
        how, plan = PLANNED, planner_of(settings, cost_model).plan(case.lengths, 0)
    else:
        how, settings, plan = fastest_rows(case, settings, cost_model)
    path = folder / "iteration.plan"
    path.write_bytes(encode(plan))
    settings = msgspec.structs.replace(settings, partition=None)  # whose part is done
    return Planned(case=case, method=method, how=how, settings=settings, plan=str(path))


def fastest_rows(
    case: Case, settings: PlannerSettings, cost_model: CostModel
) -> tuple[str, PlannerSettings, IterationPlan]:
    """The rows of least predicted time: whose rule they follow, their settings, their plan.

    Raises:
        PlanningError: none can be planned.
    """
    longest = Longest.of_tokens(case.family, *case.longest)
    fastest: tuple[str, PlannerSettings, IterationPlan] | None = None
    refusal: PlanningError | None = None
    for pipeline in by_hand(settings, cost_model, case.lengths):
        for method in TRAINERS:
            of_method = method_settings(method, longest, pipeline)
            try:
                plan = planner_of(of_method, cost_model).plan(case.lengths, 0)
            except PlanningError as error:
                refusal = refusal or error
                continue
            if fastest is None or plan.totals.predicted_ns < fastest[2].totals.predicted_ns:
                fastest = method, of_method, plan
    if fastest is None:
        raise refusal or PlanningError("no rows of other trainers can be planned")
    return fastest


def main() -> None:
    case = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Case)
    method, output = sys.argv[2], Path(sys.argv[3])
    output.mkdir(parents=True, exist_ok=True)
    made = planned(case, method, output)
    part = output / "planned.part"
    part.write_bytes(msgspec.json.encode(made))
    part.rename(output / "planned.json")


if __name__ == "__main__":
    main()
