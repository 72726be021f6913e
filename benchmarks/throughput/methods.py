"""The ways to make micro-batches that the benchmark trains, as settings of the planner."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.units import BatchLayout, Recompute

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
        layers_per_stage: of each stage; None splits layers equally.
        jobs_per_device: jobs that are up at a time and divide each GPU's memory.
        port: of the driver, on this machine.
    """

    method: str
    model: str
    flags: list[str]
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    layers_per_stage: list[int | float] | None = None
    jobs_per_device: int = 1
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to make micro-batches.

    Attributes:
        says: what it is, for the table.
        planner: its settings, from those of a run and the longest input and target in positions.
        plans_split: whether its layer split is planned; the baselines split layers equally.
        halves: whether a planned split may divide layers between attention and MLP.
        joins: whether samples are joined to rows in which they attend to one another: another function is trained.
    """

    says: str
    planner: Settings
    plans_split: bool = False
    halves: bool = True
    joins: bool = False


def _planned(*layouts: BatchLayout) -> Settings:
    return lambda run, longest: msgspec.structs.replace(run, micro_batch_layouts=layouts)


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


METHODS: dict[str, Method] = {
    "planned": Method(
        says="planned: padded or packed by the plan, planned layer split",
        planner=_planned(BatchLayout.PADDED, BatchLayout.PACKED),
        plans_split=True,
    ),
    "planned_padded": Method(
        says="planned, padded micro-batches only", planner=_planned(BatchLayout.PADDED), plans_split=True
    ),
    "packed_rows": Method(
        says="rows of the maximum length, first fit decreasing, attention kept apart; 1F1B",
        planner=_baseline(PartitionAlgorithm.PACKED_ROWS, to_maximum=True),
    ),
    "dp_balanced": Method(
        says="rows as Megatron-LM's own scheduler packs them (next fit); 1F1B",
        planner=_baseline(PartitionAlgorithm.DP_BALANCED, to_maximum=True),
    ),
    "verl": Method(
        says="rows as verl packs them (equal work); 1F1B", planner=_baseline(PartitionAlgorithm.VERL, to_maximum=True)
    ),
    "slime": Method(
        says="rows as slime packs them (equal FLOPs); 1F1B",
        planner=_baseline(PartitionAlgorithm.SLIME, to_maximum=True),
    ),
    "packing": Method(
        says="packing of 2023: samples joined to rows of the maximum length without masks between them; 1F1B",
        planner=_baseline(PartitionAlgorithm.PADDING, to_maximum=True),
        joins=True,
    ),
    "token_based": Method(
        says="sorted, a fixed number of padded tokens per micro-batch; 1F1B",
        planner=_baseline(PartitionAlgorithm.TOKEN_BASED),
    ),
    "uniform": Method(
        says="sorted, a fixed number of samples per micro-batch; 1F1B", planner=_baseline(PartitionAlgorithm.UNIFORM)
    ),
    "padding": Method(
        says="every sample padded to the maximum; 1F1B", planner=_baseline(PartitionAlgorithm.PADDING, to_maximum=True)
    ),
}
"""By the names of the report."""

STOCK = "stock"
"""Megatron's own GPT and schedule on rows of the maximum length that are cut from the same tokens: no planning, no
padding, one sample to a row. What an absolute reference is to the ratios."""
METHODS[STOCK] = Method(
    says="Megatron alone on equal rows cut from the same tokens; 1F1B", planner=_planned(BatchLayout.PADDED)
)


def _padded_but(**changes: object) -> Settings:
    """Planned, padded micro-batches with one part of the planner replaced."""
    return lambda run, longest: msgspec.structs.replace(run, micro_batch_layouts=PADDED, **changes)


ABLATIONS: dict[str, Method] = {
    "whole_samples": Method(
        says="planned, no sample cut",
        planner=lambda run, longest: msgspec.structs.replace(
            run, micro_batch_layouts=(BatchLayout.PADDED, BatchLayout.PACKED), slices="off"
        ),
        plans_split=True,
    ),
    "whole_layers": Method(
        says="planned, no layer divided",
        planner=_planned(BatchLayout.PADDED, BatchLayout.PACKED),
        plans_split=True,
        halves=False,
    ),
    "padded_equal_split": Method(
        says="planned, padded, layers split equally", planner=_planned(BatchLayout.PADDED), plans_split=False
    ),
    "padded_fixed_tokens": Method(
        says="a fixed number of padded tokens per micro-batch, list-scheduled, planned layer split",
        planner=_padded_but(partition=PartitionSettings(algorithm=PartitionAlgorithm.TOKEN_BASED)),
        plans_split=True,
    ),
    "padded_no_search": Method(
        says="the partition as it is, list-scheduled",
        planner=_padded_but(schedule=ScheduleSettings(search_evaluations=0)),
        plans_split=True,
    ),
    "padded_1f1b": Method(
        says="planned, padded, 1F1B", planner=_padded_but(schedule=ScheduleSettings(method="1f1b")), plans_split=True
    ),
    "padded_full_recompute": Method(
        says="planned, padded, everything computed again",
        planner=_padded_but(recompute=(Recompute.FULL,)),
        plans_split=True,
    ),
}
"""Parts of the planner replaced, for `benchmarks/paper/ablations.py`; trained where they are named."""
