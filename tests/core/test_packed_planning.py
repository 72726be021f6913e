"""Packed rows as a choice of the planner."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.partition import OrderedPartitions
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.problem import BatchProblem
from megatron_dynapipe.core.search import search
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import CostTables, TableCostModel
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.ways.rules import verify
from tests.core.packed_oracle import best_makespan_ns
from tests.core.partition_oracle import batch_problems
from tests.core.planner_cases import batch, cost_model, of_lengths
from tests.core.planner_cases import settings as settings_of
from tests.helpers.benchmark_data import BENCHMARKS
from tests.helpers.examples import examples
from tests.helpers.settings import settings_in_layers

GPT, T5 = ModelFamily.GPT, ModelFamily.T5
PADDED, PACKED = (BatchLayout.PADDED,), (BatchLayout.PACKED,)
BOTH = (BatchLayout.PADDED, BatchLayout.PACKED)


class _Derived:
    """The analytic costs without those of packed rows, which are then derived."""

    def __init__(self, family: ModelFamily) -> None:
        self._model = cost_model(family)
        self.name, self.family, self.digest, self.links = "derived", family, "d", self._model.links
        self.hidden_size = self._model.hidden_size

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        return replace(self._model.tables(tensor_parallel=tensor_parallel, recompute=recompute), packed=None)


def plan(
    family: ModelFamily,
    layouts: tuple[BatchLayout, ...],
    given: GlobalBatch,
    *,
    derived: bool = True,
    forward_only: bool = False,
    **changes: object,
) -> IterationPlan:
    costs = _Derived(family) if derived else cost_model(family)
    planner = planner_of(settings_of(family, micro_batch_layouts=layouts, **changes), costs)
    return planner.plan(given, 0, forward_only=forward_only)


@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize(("family", "layouts"), [(GPT, BOTH), (GPT, PADDED), (T5, PACKED)])
def test_lengths_are_multiples_of_what_the_settings_say(family, layouts, multiple):
    """Of pieces, too, and the core prices rows so: the same batch in multiples of 8 takes no longer."""
    changes = {"slices": multiple} if PACKED[0] in layouts and family is GPT else {}
    planned = plan(family, layouts, batch(family, 40), length_multiple=multiple, **changes)
    verify(planned, expected_samples=range(100, 140))
    shapes = [micro_batch.shape for replica in planned.replicas for micro_batch in replica.micro_batches]
    assert shapes and not [shape for shape in shapes if shape.input_length % multiple or shape.target_length % multiple]
    shorter = plan(family, layouts, batch(family, 40), **changes)
    assert shorter.totals.predicted_ns <= planned.totals.predicted_ns * 1.02


@pytest.mark.parametrize(
    ("family", "layouts", "changes"),
    [
        *((family, layouts, {"data_parallel": 2}) for family in ModelFamily for layouts in (PACKED, BOTH)),
        *((family, layouts, {"derived": False}) for family in ModelFamily for layouts in (PACKED, BOTH)),
        *((GPT, PACKED, changes) for changes in ({"chunks": 2}, {"pipeline_parallel": 1}, {"pipeline_parallel": 4})),
        *((GPT, PACKED, {"schedule": ScheduleSettings(method=method)}) for method in ("1f1b", "gpipe")),
        (T5, PACKED, {"forward_only": True}),
    ],
)
def test_every_sample_is_planned_in_allowed_layouts_the_same_way_twice(family, layouts, changes):
    planned, again = (plan(family, layouts, batch(family, 40), **changes) for _ in range(2))
    verify(planned, expected_samples=range(100, 140))
    assert planned.batch_layouts == layouts and digest(again) == digest(planned)
    assert all(mb.layout in layouts for replica in planned.replicas for mb in replica.micro_batches)


@pytest.mark.parametrize("family", ModelFamily)
def test_packed_rows_waste_nothing_and_predict_less_time(family: ModelFamily) -> None:
    given = batch(family, 60)
    padded, packed = plan(family, PADDED, given), plan(family, BOTH, given)
    assert packed.totals.predicted_ns < padded.totals.predicted_ns
    assert packed.totals.real_tokens / packed.totals.padded_positions > 0.93


@settings(max_examples=examples(25))
@given(batch_problems(most_samples=4, layouts=PACKED), st.integers(0, 3))
def test_small_batches_against_everything_there_is(problem: BatchProblem, seed: int) -> None:
    """The search comes within 10% of the best of all rows, modes and orders, and finds rows wherever there are some."""
    problem = replace(problem, replicas=1)
    everything = OrderedPartitions(order=np.arange(len(problem.inputs)), partitions=())
    found = search(problem, everything, evaluations=3000, seed=seed)
    best = best_makespan_ns(problem) if problem.layout.chunks == 1 else None
    if best is None:
        return
    if not found:
        pytest.fail("no rows were found where there are some")
    (replica,) = found
    costs, _ = problem.costs_of(replica.members, replica.batch_layouts, replica.modes)
    makespan = simulate(costs, replica.order).makespan_ns
    assert makespan <= best * 1.1 + 1


def test_short_samples_among_very_many_do_not_all_come_into_one_row() -> None:
    """Their part of all work was rounded to none, so that one row seemed to have room for all of them."""
    planned = plan(GPT, PACKED, of_lengths([2001] * 5000 + [5] * 4000), derived=False, encoder_layers=4)
    rows = [sum(row.input_lengths) for row in planned.replicas[0].micro_batches]
    assert max(rows) < 1.5 * np.median(rows)


@pytest.mark.slow
def test_samples_of_large_batches_take_no_longer_than_those_of_small_ones() -> None:
    """100,000 took 1.25 times as long each: all rows to begin with were longer than memory holds as they are."""
    recorded = json.loads(gzip.decompress((BENCHMARKS / "data/batches/flan_like.json.gz").read_bytes()))["batches"]
    lengths = [n for each in recorded if each["id"].startswith("gpt-s2048-t1048576") for n in each["input"]]
    made = planner_of(
        settings_in_layers(
            GPT,
            encoder_layers=32,
            hidden_size=4096,
            pipeline_parallel=8,
            layers_per_stage=(4.5, 4.5, 4.5, 4.5, 4.5, 4, 4, 1.5),
            memory_limit_bytes=72 * 10**9,
            distributed_optimizer=True,
            micro_batch_layouts=PACKED,
        ),
        TableCostModel.load(BENCHMARKS / "data/h100/gpt_7b.json.gz"),
    )

    def of_each(samples: int) -> float:
        chosen = np.random.default_rng(0).choice(lengths, samples)
        return made.plan(of_lengths(chosen), 0).totals.predicted_ns / int(chosen.sum())

    assert of_each(100_000) <= 1.01 * of_each(30_000)
