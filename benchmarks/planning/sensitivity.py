"""What plans lose where costs are wrong: the public batches planned by costs that the devices do not keep to.

    python -m benchmarks.planning.sensitivity DATA [--batches gpt-s8192 …] [--settings 1,1,8 1,2,4] [--seed 0]

DATA is that of `recorded.py`; GPT-6.7B in 36,000 MB, whole samples. A plan keeps its micro-batches and its order of
passes, and is replayed by the true costs:

    kinds       attention, MLP or head alone take 10 or 20% more, or less
    random      every micro-batch takes so much more or less, drawn by its samples
    slow stage  the passes of one stage take 10 or 20% longer
    slow link   messages between two stages take ten times as long

Beside each is the loss against a plan that knew: planned by the true costs where a kind is wrong; else with the same
micro-batches, their passes ordered by the true costs; where a stage is slow, also with half a layer or one of it on
another: whichever is fastest. And what packed rows of other trainers, in 1F1B's order, take over the plan
that did not know.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planning.recorded import BOTH, MODELS, _settings, batches, cost_model, half_layers
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.costs import ATTENTION, HEAD, MLP
from megatron_dynapipe.core.orders import adaptive
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.simulate import simulate
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import CostModel, CostTables, Quantity
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.rivals.methods import Longest, method_settings

TIMES = [Quantity.FORWARD, Quantity.BACKWARD, Quantity.WEIGHT]
Change = Callable[[ScheduleProblem], ScheduleProblem]


class TrueCosts:
    """Costs of a model of which one kind of modules takes another time."""

    def __init__(self, believed: CostModel, kind: str, factor: float) -> None:
        self._believed, self._kind, self._factor = believed, kind, factor
        self.name, self.family, self.hidden_size = believed.name, believed.family, believed.hidden_size
        self.links, self.digest = believed.links, f"{believed.digest} {kind} {factor}"

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """The tables, the kind's times changed."""
        tables = self._believed.tables(tensor_parallel=tensor_parallel, recompute=recompute)
        at = tables.kinds.index(self._kind)
        changed = [None if values is None else values.copy() for values in (tables.values, tables.separate)]
        for values in changed:
            if values is not None:
                known = values[at, TIMES] >= 0
                values[at, TIMES] = np.where(known, np.rint(values[at, TIMES] * self._factor), values[at, TIMES])
        return replace(tables, values=changed[0], separate=changed[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--batches", nargs="*", default=["gpt-s2048", "gpt-s8192"], help="begin with")
    parser.add_argument("--settings", nargs="*", default=["1,1,8", "1,2,4"], help="data,tensor,pipeline parallel")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    costs = cost_model(MODELS[0].costs, args.data)
    for setting in args.settings:
        layout = tuple(map(int, setting.split(",")))
        changes = {"micro_batch_layouts": BOTH, "split_backward": "auto", "layers_per_stage": "halves"}
        settings = _settings(MODELS[0], layout, 36, changes, ())
        settings = settings.with_layers_per_stage(half_layers(32, layout[2]))
        for start in args.batches:
            chosen = [name for name in batches(args.data) if "t65536" in name and name.startswith(start)]
            rows: dict[str, list[tuple[float, float]]] = {}
            for name in chosen:
                batch = batches(args.data)[name]
                for row, numbers in losses(settings, costs, batch, np.random.default_rng(args.seed)):
                    rows.setdefault(row, []).append(numbers)
            for row, numbers in rows.items():
                lost, over = (statistics.geometric_mean(column) for column in zip(*numbers, strict=True))
                worst = max(number for number, _ in numbers)
                print(f"| {setting} | {start} | {row} | {lost - 1:.1%} | {worst - 1:.1%} | {over:.3f} |", flush=True)


def losses(
    settings: PlannerSettings, costs: CostModel, batch: GlobalBatch, random: np.random.Generator
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Each way to be wrong: its name, the plan's time over that of one that knew, and packed rows' over the plan's."""
    longest = Longest.of_tokens(ModelFamily.GPT, int(batch.input_lengths.max()), 0)
    packed_settings = method_settings("packed_rows", longest, settings)
    plan, packed = Planned(settings, costs, batch), Planned(packed_settings, costs, batch)
    yield "right", (1.0, packed.replayed() / plan.replayed())
    for kind in (ATTENTION, MLP, HEAD):
        for factor in (0.8, 0.9, 1.1, 1.2):
            truth = TrueCosts(costs, kind, factor)
            blind = plan.replayed(plan.costs_by(truth))
            known = min(blind, Planned(settings, truth, batch).replayed())
            yield f"{kind} {factor - 1:+.0%}", (blind / known, packed.replayed(packed.costs_by(truth)) / blind)
    for name, change in _changes(settings.pipeline_parallel, random):
        changed = change(plan.scheduled.costs)
        blind, packed_blind = plan.replayed(changed), packed.replayed(change(packed.scheduled.costs))
        known = min(blind, plan.replayed(changed, anew=True))
        if name.startswith("stage"):
            for lighter in _with_less(settings, settings.pipeline_parallel // 2):
                other = Planned(lighter, costs, batch)
                known = min(known, other.replayed(change(other.scheduled.costs)))
        yield name, (blind / known, packed_blind / blind)


def _with_less(settings: PlannerSettings, stage: int) -> Iterator[PlannerSettings]:
    """Settings with half a layer of a stage, or a whole one, on another."""
    layers = settings.layout.layers_per_stage
    for moved in (0.5, 1):
        for other in set(range(len(layers))) - {stage}:
            split = [n + moved * (at == other) - moved * (at == stage) for at, n in enumerate(layers)]
            whole = tuple(int(n) if n % 1 == 0 else n for n in split)
            yield settings.with_layers_per_stage(whole)


def _changes(stages: int, random: np.random.Generator) -> Iterator[tuple[str, Change]]:
    """Changes of costs that no cost model holds."""
    for share in (0.1, 0.2):
        seed = int(random.integers(2**32))

        def by_sample(problem: ScheduleProblem, share: float = share, seed: int = seed) -> ScheduleProblem:
            factors = np.random.default_rng(seed).uniform(1 - share, 1 + share, (problem.micro_batches, 1))
            return _scaled(problem, factors)

        yield f"random ±{share:.0%}", by_sample
    for share in (0.1, 0.2):

        def slow(problem: ScheduleProblem, share: float = share) -> ScheduleProblem:
            factors = 1 + share * (np.arange(problem.virtual_stages) % problem.stages == problem.stages // 2)
            return _scaled(problem, factors)

        yield f"stage {stages // 2} {share:+.0%}", slow

    def slow_link(problem: ScheduleProblem) -> ScheduleProblem:
        forward, backward = problem.forward_transfer_ns.copy(), problem.backward_transfer_ns.copy()
        forward[:, stages // 2 - 1] *= 10
        backward[:, stages // 2] *= 10
        return replace(problem, forward_transfer_ns=forward, backward_transfer_ns=backward)

    yield f"link {stages // 2 - 1} to {stages // 2} × 10", slow_link


def _scaled(problem: ScheduleProblem, factors: np.ndarray) -> ScheduleProblem:
    times = {name: getattr(problem, name) for name in ("forward_ns", "backward_ns", "weight_ns")}
    scaled = {name: np.rint(values * factors).astype(np.int64) for name, values in times.items()}
    return replace(problem, **scaled)


class Planned:
    """The micro-batches of a plan with the order of their passes, to be replayed by other costs."""

    def __init__(self, settings: PlannerSettings, costs: CostModel, batch: GlobalBatch) -> None:
        self._settings = settings
        self._samples, self.scheduled = planner_of(settings, costs).scheduled(batch, forward_only=False, seconds={})

    def costs_by(self, costs: CostModel) -> ScheduleProblem:
        """What the micro-batches cost by another cost model."""
        problem, plan = planner_of(self._settings, costs).problem(self._samples), self.scheduled
        return problem.costs_of(plan.members, plan.batch_layouts, plan.modes)[0]

    def replayed(self, costs: ScheduleProblem | None = None, *, anew: bool = False) -> int:
        """Time by costs (the believed ones) in the plan's order; `anew`: in one of whole passes that they choose."""
        slowest = 0
        for rows, schedule in zip(self.scheduled.replicas, self.scheduled.schedules, strict=True):
            problem = (self.scheduled.costs if costs is None else costs).take(rows)
            slowest = max(slowest, simulate(problem, adaptive(problem) if anew else schedule.order).makespan_ns)
        return slowest


if __name__ == "__main__":
    main()
