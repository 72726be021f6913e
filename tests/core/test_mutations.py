"""Thousands of corrupted plans: what `verify` accepts must run, and what cannot run it must refuse."""

import random

import pytest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Instruction, RecvStart, SendStart
from megatron_dynapipe.core.native import fast_verify
from megatron_dynapipe.core.verify_buffers import Dimensions
from tests.core.toy_executor import ToyError, ToyPipeline
from tests.helpers.lists import verify_lists
from tests.helpers.plans import make_plan

MUTANTS_PER_PLAN = 100

PLANS = {
    "one stage": {"micro_batches": (2,), "stages": 1},
    "two stages": {"micro_batches": (3,), "stages": 2},
    "three stages": {"micro_batches": (4,), "stages": 3},
    "fewer micro-batches than stages": {"micro_batches": (2,), "stages": 4},
    "two chunks": {"micro_batches": (3,), "stages": 2, "chunks": 2},
    "three chunks on three stages": {"micro_batches": (2,), "stages": 3, "chunks": 3},
    "everything forward, then backward": {"micro_batches": (3,), "stages": 3, "method": "gpipe"},
    "halves": {"micro_batches": (4,), "stages": 3, "halves": True},
    "halves on two chunks": {"micro_batches": (3,), "stages": 2, "chunks": 2, "halves": True},
    "forward only": {"micro_batches": (3,), "stages": 3, "forward_only": True},
}


def drop(lists, choose):
    steps = choose.choice([steps for steps in lists if steps])
    del steps[choose.randrange(len(steps))]


def duplicate(lists, choose):
    steps = choose.choice([steps for steps in lists if steps])
    steps.insert(choose.randrange(len(steps) + 1), choose.choice(steps))


def swap(lists, choose):
    steps = choose.choice([steps for steps in lists if len(steps) > 1])
    i = choose.randrange(len(steps) - 1)
    steps[i], steps[i + 1] = steps[i + 1], steps[i]


def reorder(lists, choose):
    steps = choose.choice([steps for steps in lists if steps])
    step = steps.pop(choose.randrange(len(steps)))
    steps.insert(choose.randrange(len(steps) + 1), step)


def reshape(lists, choose):
    places = [(s, i) for s in lists for i, step in enumerate(s) if isinstance(step, SendStart | RecvStart)]
    if not places:
        return
    steps, i = choose.choice(places)
    (first, *rest), *others = steps[i].shapes
    steps[i] = _replace(steps[i], shapes=((first + choose.choice([-1, 1]), *rest), *others))


def readdress(lists, choose):
    steps = choose.choice([steps for steps in lists if steps])
    i = choose.randrange(len(steps))
    fields = [name for name in steps[i].__struct_fields__ if name in ("micro_batch", "chunk", "peer")]
    name = choose.choice(fields)
    steps[i] = _replace(steps[i], **{name: getattr(steps[i], name) + choose.choice([-1, 1])})


def move_between_stages(lists, choose):
    steps = choose.choice([steps for steps in lists if steps])
    choose.choice(lists).append(steps.pop(choose.randrange(len(steps))))


MUTATIONS = (drop, duplicate, swap, reorder, reshape, readdress, move_between_stages)


def _replace(step: Instruction, **changes):
    return type(step)(**{name: getattr(step, name) for name in step.__struct_fields__} | changes)


@pytest.mark.parametrize("name", PLANS)
def test_corrupted_plans_are_equivalent_or_refused(name):
    settings = PLANS[name]
    plan = make_plan(**settings)
    whole = [stage.instructions for stage in plan.replicas[0].stages]
    about = {
        "micro_batches": settings["micro_batches"][0],
        "chunks": settings.get("chunks", 1),
        "forward_only": settings.get("forward_only", False),
    }
    verify_lists(whole, **about)
    ToyPipeline(whole, **about).run()
    accepted = refused = 0
    for seed in range(MUTANTS_PER_PLAN * len(MUTATIONS)):
        choose = random.Random(seed)
        lists = [list(steps) for steps in whole]
        for _ in range(choose.choice([1, 1, 2])):
            MUTATIONS[seed % len(MUTATIONS)](lists, choose)
        fast = fast_verify(Dimensions(stages=len(lists), **about), lists)
        try:
            steps = verify_lists(lists, **about)
        except PlanError:
            assert fast is None
            refused += 1
            continue
        assert fast is not None
        assert (fast.passes, fast.sends) == (steps.passes, list(map(sorted, steps.sends)))
        accepted += 1
        for turn in range(3):
            ToyPipeline(lists, **about, seed=turn).run()
    assert refused > accepted
    assert accepted > 0, "swaps of independent steps are equivalent"


def test_the_toy_executor_refuses_too():
    whole = [list(stage.instructions) for stage in make_plan((2,), 2).replicas[0].stages]
    for stage, steps in enumerate(whole):
        for step in range(len(steps)):
            lists = [list(steps) for steps in whole]
            del lists[stage][step]
            with pytest.raises(ToyError):
                ToyPipeline(lists, micro_batches=2).run()
