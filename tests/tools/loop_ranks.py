"""What the tests of `planned` run on ranks."""

import itertools
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.megatron.execution import megatron_stage
from megatron_dynapipe.tools.loop import planned
from tests.helpers.layouts.layout import Layout
from tests.helpers.loops import Loop, by_megatron, by_plans, costs, shared_rows, wire_rows

MEMORY_MB = {1: 3.0, 2: 1.9}
"""Of a device, by stages: so little that the longer replica's samples are several micro-batches."""


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def reference(*, rank: int, world_size: int, layout: Layout, per_token: bool = False) -> dict[str, Any]:
    """An iteration by Megatron's schedule, one sample a micro-batch."""
    loop = Loop(layout, per_token=per_token)
    return loop.iteration(by_megatron(loop), by_megatron(loop))


def trained(*, rank: int, world_size: int, layout: Layout, per_token: bool = False, **settings: Any) -> dict[str, Any]:
    """Iterations by plans: at first; after a sleep; with a fault; and outputs that are no losses."""
    loop = Loop(layout, per_token=per_token)
    before = groups()
    found = {}
    seen: list[Any] = []
    given = {
        "memory_mb": MEMORY_MB[layout.stages],
        "wire_rows": shared_rows if layout.sequence else wire_rows,
        **settings,
    }
    with ExitStack() as blocks:
        plans = [blocks.enter_context(planned(model, costs(), **given)) for model in (loop.policy, loop.reference)]
        passes = [by_plans(loop, of_model, seen) for of_model in plans]
        found["planned"] = loop.iteration(*passes)
        for of_model in plans:
            of_model.sleep()
        asleep = groups()
        for of_model in plans:
            of_model.wake()
        found["awake"] = loop.iteration(*passes)
        faulty = partial(by_one, megatron_stage.forward_step_calc_loss)
        with mock.patch.object(megatron_stage, "forward_step_calc_loss", faulty):
            found["divided by one"] = loop.iteration(*passes)
        non_loss = collected(loop, plans[0])
        awake = groups()
    counted = [before, asleep, awake]
    return {"found": found, "seen": seen, "groups": counted, "non_loss": non_loss, "place": loop.place}


def by_one(calculate_loss: Any, *arguments: Any, **keywords: Any) -> Any:
    return calculate_loss(*arguments, **keywords | {"num_microbatches": 1})


def collected(loop: Loop, plans: Any) -> list[Any]:
    """What the loss function gives of each sample with collect_non_loss_data."""
    indices = plans.micro_batches(loop.lengths, forward_only=True)
    reports = plans.forward_backward(
        forward_step_func=partial(loop.step, update=False),
        data_iterator=[iter(loop.rows(indices)) for _ in loop.policy],
        model=loop.policy,
        num_microbatches=len(indices),
        forward_only=True,
        collect_non_loss_data=True,
    )
    of_place = dict(zip(itertools.chain(*indices), itertools.chain(*reports), strict=bool(reports)))
    return [of_place[place] for place in sorted(of_place)]


def said(function: Any, *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except DynaPipeError as error:
        return str(error)
    return "nothing"


def equal(*, rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    """Replicas in step; then one of them has a sample less, one has none, one has no lengths."""
    loop = Loop(layout)
    seen: list[Any] = []
    expected = loop.iteration(by_megatron(loop), by_megatron(loop))
    with planned(
        loop.policy, costs(), memory_mb=MEMORY_MB[layout.stages], wire_rows=wire_rows, equal_counts=True
    ) as plans:
        passes = by_plans(loop, plans, seen)
        with planned(loop.reference, costs(), memory_mb=MEMORY_MB[layout.stages], wire_rows=wire_rows) as others:
            found = loop.iteration(passes, by_plans(loop, others, []))
            refused = [
                said(plans.micro_batches, loop.lengths[loop.replica :]),
                said(others.micro_batches, loop.lengths if rank else []),
                said(others.micro_batches, loop.lengths if rank else ["a"]),
            ]
    return {"expected": expected, "found": found, "seen": seen, "refused": refused}


def wrong(*, rank: int, world_size: int, layout: Layout, **settings: Any) -> None:
    """The step function's rows are longer than said."""
    loop = Loop(layout)
    with planned(loop.policy, costs(), memory_mb=MEMORY_MB[layout.stages], timeout_s=20, **settings) as plans:
        by_plans(loop, plans, [])(loop.policy)


def refused(*, rank: int, world_size: int) -> dict[str, str]:
    """What is said of each thing that planned passes would get wrong."""
    loop = Loop(Layout(attention="megatron"))
    config = loop.policy[0].config

    def opened(changes: dict[str, Any] | None = None, **settings: Any) -> str:
        def enter() -> None:
            with planned(loop.policy, costs(), **{"memory_mb": 100, "wire_rows": wire_rows, **settings}):
                pass

        with mock.patch.dict(vars(config), changes or {}):
            return said(enter)

    found = {
        "nothing": opened(),
        "fp8": opened({"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
        "weights later": opened({"delay_wgrad_compute": True}),
        "graphs": opened({"cuda_graph_impl": "local"}),
        "a shared sequence": opened({"context_parallel_size": 2}, wire_rows=None),
        "replayed routes": opened({"moe_enable_routing_replay": True}, recompute=tuple(Recompute)),
        "a setting": opened(pipeline_parallel=2),
        "halves": opened(split_backward="on"),
        "no setting": opened(pieces=2),
        "memory": opened(memory_mb=0.1),
    }
    with planned(loop.policy, costs(), memory_mb=100, wire_rows=wire_rows) as plans:

        def ran(**changes: Any) -> str:
            plans.micro_batches(loop.lengths, forward_only=True)
            how = {
                "forward_step_func": partial(loop.step, update=False),
                "data_iterator": iter(loop.rows([[0]])),
                "model": loop.policy,
                "num_microbatches": 1,
                "forward_only": True,
            }
            found = said(plans.forward_backward, **how | changes)
            plans._planned.clear()
            return found

        found |= {
            "ran": ran(),
            "number": ran(num_microbatches=2),
            "training": ran(forward_only=False),
            "another model": ran(model=loop.reference),
            "iterators": ran(data_iterator=[iter(()), iter(())]),
            "early end": ran(data_iterator=iter(())),
            "argument": ran(pg_collection=object()),
            "nominal": ran(seq_length=8, micro_batch_size=1, pg_collection=None),
            "no plan": said(plans._next, 1, False),
        }
        plans.sleep()
        found["asleep"] = said(plans.micro_batches, loop.lengths)
        plans.wake()
    return found
