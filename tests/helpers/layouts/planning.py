"""The planner of a layout."""

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.choosing.planners import model_state_of, planner_of, tables_of
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES, Network
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.plan import IterationPlan, ReplicaPlan, StagePlan
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout, Recompute
from megatron_dynapipe.costing import CPU_RATES, AnalyticCostModel, ModelShape, ScatterGather
from megatron_dynapipe.ways import ways_of
from megatron_dynapipe.ways.rules import RULES
from tests.helpers.layouts.layout import HEADS, MAX_LENGTH, VOCABULARY, Layout
from tests.helpers.packed_plans import followed, halved, relaid, teamed
from tests.helpers.settings import settings_in_layers


class LayoutPlanner(Planner):
    """Gives micro-batches on stages the layout's recompute modes in turn, rows in turn, and some replicas none."""

    modes: tuple[Recompute, ...] = (Recompute.NONE,)
    rows = "padded"
    divided = 0
    of_busy: Sequence[Planner] = ()  # by iteration
    teams: Sequence[Sequence[int]] = ()
    then: Sequence[int] = ()

    def plan(self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """In two halves one after another, if there are teams of the second one."""
        if not self.then:
            return self._planned(batch, iteration, self.teams, self.of_busy, forward_only=forward_only)
        first, second = (_part(batch, half) for half in np.array_split(np.arange(len(batch)), 2))
        before = self._planned(first, iteration, self.teams, self.of_busy[:-1], forward_only=forward_only)
        after = self._planned(second, iteration, [self.then], self.of_busy[-1:], forward_only=forward_only)
        return followed(before, after)

    def _planned(
        self,
        batch: GlobalBatch,
        iteration: int,
        teams: Sequence[Sequence[int]],
        of_busy: Sequence[Planner],
        *,
        forward_only: bool,
    ) -> IterationPlan:
        make = of_busy[iteration % len(of_busy)].plan if of_busy else super().plan
        plan = make(batch, iteration, forward_only=forward_only)
        replicas = []
        for replica in plan.replicas:
            micro_batches = tuple(
                msgspec.structs.replace(
                    micro_batch,
                    recompute=tuple(
                        self.modes[at % len(self.modes)] for at in range(index, index + len(micro_batch.recompute))
                    ),
                )
                for index, micro_batch in enumerate(replica.micro_batches)
            )
            replicas.append(msgspec.structs.replace(replica, micro_batches=micro_batches))
        stages = [StagePlan(stage=s, instructions=(), predicted=()) for s in range(plan.pipeline_stages)]
        empty = ReplicaPlan(micro_batches=(), stages=tuple(stages), predicted_ns=0)
        idle = 0 if teams else self.settings.data_parallel - len(replicas)
        plan = msgspec.structs.replace(plan, replicas=(*replicas, *[empty] * idle))
        ranks = self.settings.tensor_parallel if self.settings.sequence_parallel else 1
        if self.divided:
            plan = halved(plan, every=self.divided)
        plan = plan if self.rows == "planned" else relaid(plan, self.rows, sequence_parallel=ranks)
        if teams:
            plan = teamed(plan, teams[iteration % len(teams)], sequence_parallel=ranks)
        return plan


def _part(batch: GlobalBatch, places: npt.NDArray[np.int64]) -> GlobalBatch:
    return dataclasses.replace(
        batch,
        sample_ids=batch.sample_ids[places],
        input_lengths=batch.input_lengths[places],
        target_lengths=batch.target_lengths[places],
        labels=None if batch.labels is None else batch.labels[places],
    )


def planner(layout: Layout) -> LayoutPlanner:
    encoder, decoder = layout.layers
    most = max((size for sizes in layout.teams for size in sizes), default=1)
    settings = settings_in_layers(
        layout.kind,
        encoder,
        decoder,
        hidden_size=layout.hidden,
        data_parallel=layout.replicas,
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_parallel=layout.stages,
        chunks=layout.chunks,
        layers_per_stage=layout.split,
        pattern=layout.pattern,
        memory_limit_bytes=10**9,
        recompute=(Recompute.NONE,),
        element_bytes=4,
        schedule=ScheduleSettings(search_evaluations=0),
        scatter_gather=ScatterGather(layout.scatter_gather),
        transfers=CUDA_RULES if layout.transfers == "cuda" else GLOO_RULES,
        micro_batch_layouts=tuple(BatchLayout) if layout.rows == "planned" or layout.teams else (BatchLayout.PADDED,),
        slices=layout.slices or "off",
        context_teams=most,
        network=Network(devices_per_node=2 if layout.teams else 8),  # of which larger teams span several
    )
    sizes = {"hidden": layout.hidden, "kv_channels": layout.hidden // HEADS, "ffn": 4 * layout.hidden}
    shape = ModelShape(family=layout.kind, heads=HEADS, vocabulary=VOCABULARY, **sizes)
    rates = msgspec.structs.replace(CPU_RATES, layer_overhead_us=layout.layer_overhead_us)
    costs = AnalyticCostModel(shape, rates, max_size=64, max_length=MAX_LENGTH)
    made = LayoutPlanner(
        settings,
        tables=tables_of(settings, costs),
        links=links_of(settings),
        model_state_bytes=model_state_of(settings, tables_of(settings, costs)),
        ways=ways_of(settings),
        rules=RULES,
        costs_digest=costs.digest,
    )
    made.modes, made.rows = tuple(map(Recompute, layout.recompute)), layout.rows
    made.divided = layout.divided
    made.teams, made.then = layout.teams, layout.then
    every = [*layout.teams, *([layout.then] if layout.then else [])]
    busy = [layout.replicas - layout.idle] if layout.idle else [len(sizes) for sizes in every]
    alone = settings
    if layout.teams:
        alone = msgspec.structs.replace(settings, context_teams=1, micro_batch_layouts=(BatchLayout.PADDED,))
    made.of_busy = [planner_of(msgspec.structs.replace(alone, data_parallel=replicas), costs) for replicas in busy]
    return made
