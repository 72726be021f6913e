"""The ways to make micro-batches that the benchmark trains, as settings of the planner."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from benchmarks.planning.dp_balanced import DpBalanced
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, Recompute
from megatron_dynapipe.ways.rivals.settings import PartitionAlgorithm, PartitionSettings

PADDED, PACKED = (BatchLayout.PADDED,), (BatchLayout.PACKED,)


Longest = tuple[int, int]
Settings = Callable[[PlannerSettings, Longest], PlannerSettings]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job of the benchmark: a method on one model and layout, and where its driver listens.

    Attributes:
        method: of `METHODS` or `ABLATIONS`.
        model: "t5" or "gpt".
        flags: of the run.
        ranks: all of them; those that tensor and pipeline parallelism leave are replicas.
        tensor_parallel: ranks that share a layer.
        pipeline_parallel: pipeline stages.
        chunks: virtual stages of a rank.
        layers_per_stage: of each (virtual) stage; None splits layers equally.
        jobs_per_device: jobs that are up at a time and divide each GPU's memory.
        port: of the driver, on this machine.
    """

    method: str
    model: str
    flags: list[str]
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    chunks: int = 1
    layers_per_stage: list[int | float] | None = None
    jobs_per_device: int = 1
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to make micro-batches.

    Attributes:
        planner: its settings, from those of a run and the longest input and target in positions.
        plans_split: whether its layer split is planned; the baselines split layers equally.
        halves: whether a planned split may divide layers between attention and MLP.
        joins: whether samples are joined to rows in which they attend to one another: another function is trained.
        labels: whether plans know which positions count, and leave others out of the last MLP and the head.
        chunks: virtual stages of a rank; more than one where there are stages.
    """

    planner: Settings
    plans_split: bool = False
    halves: bool = True
    joins: bool = False
    labels: bool = True
    chunks: int = 1


def _planned(*layouts: BatchLayout, **changes: object) -> Settings:
    return lambda run, longest: msgspec.structs.replace(run, micro_batch_layouts=layouts, **changes)


def _baseline(algorithm: PartitionAlgorithm, *, to_maximum: bool = False) -> Settings:
    """1F1B; micro-batches of one size and one recompute mode, of those tried the one of least predicted time."""

    def settings(run: PlannerSettings, longest: Longest) -> PlannerSettings:
        partition = PartitionSettings(algorithm=algorithm)
        if to_maximum:
            inputs, targets = longest
            partition = msgspec.structs.replace(
                partition, padded_input_length=inputs, padded_target_length=targets or None
            )
        return msgspec.structs.replace(
            run,
            partition=partition,
            schedule=ScheduleSettings(method="1f1b"),
            micro_batch_layouts=PADDED if algorithm.layout is not BatchLayout.PACKED else PACKED,
        )

    return settings


def _dp_balanced(run: PlannerSettings, longest: Longest) -> PlannerSettings:
    rows = DpBalanced(longest=longest[0])
    schedule = ScheduleSettings(method="1f1b")
    return msgspec.structs.replace(run, partition=rows, schedule=schedule, micro_batch_layouts=PACKED)


def _rows(algorithm: PartitionAlgorithm, *, joins: bool = False, chunks: int = 1) -> Method:
    return Method(planner=_baseline(algorithm, to_maximum=True), joins=joins, chunks=chunks)


STOCK, STOCK_PACKED = "stock", "stock_packed"
MEGATRON = (STOCK, STOCK_PACKED)
"""Of a GPT by Megatron alone."""
METHODS: dict[str, Method] = {
    "planned": Method(planner=_planned(*BatchLayout), plans_split=True),
    "planned_padded": Method(planner=_planned(*PADDED), plans_split=True),
    "planned_interleaved": Method(planner=_planned(*BatchLayout), plans_split=True, chunks=2),
    "packed_rows": _rows(PartitionAlgorithm.PACKED_ROWS),
    "packed_rows_interleaved": _rows(PartitionAlgorithm.PACKED_ROWS, chunks=2),
    "dp_balanced": Method(planner=_dp_balanced),
    "verl": _rows(PartitionAlgorithm.VERL),
    "slime": _rows(PartitionAlgorithm.SLIME),
    "packing": _rows(PartitionAlgorithm.PADDING, joins=True),
    "token_based": Method(planner=_baseline(PartitionAlgorithm.TOKEN_BASED)),
    "uniform": Method(planner=_baseline(PartitionAlgorithm.UNIFORM)),
    "padding": _rows(PartitionAlgorithm.PADDING),
    STOCK: Method(planner=_planned(*PADDED)),
    STOCK_PACKED: Method(planner=_planned(*PADDED)),
}
"""By the names of the report; README.md says what each is."""


def _ablation(**changes: object) -> Method:
    """Planned, padded micro-batches with one part of the planner replaced."""
    return Method(planner=_planned(*PADDED, **changes), plans_split=True)


ABLATIONS: dict[str, Method] = {
    "planned_all_positions": Method(planner=_planned(*BatchLayout), plans_split=True, labels=False),
    "whole_samples": Method(planner=_planned(*BatchLayout, slices="off"), plans_split=True),
    "undivided": Method(planner=_planned(*BatchLayout, split_backward="off"), plans_split=True),
    "whole_layers": Method(planner=_planned(*BatchLayout), plans_split=True, halves=False),
    "padded_equal_split": Method(planner=_planned(*PADDED)),
    "padded_fixed_tokens": _ablation(partition=PartitionSettings(algorithm=PartitionAlgorithm.TOKEN_BASED)),
    "padded_no_search": _ablation(schedule=ScheduleSettings(search_evaluations=0)),
    "padded_1f1b": _ablation(schedule=ScheduleSettings(method="1f1b")),
    "padded_full_recompute": _ablation(recompute=(Recompute.FULL,)),
}
"""Parts of the planner replaced, for `benchmarks/paper/ablations.py` and README.md; trained where they are named."""
