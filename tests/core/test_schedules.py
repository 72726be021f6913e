import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import ConfigError, InfeasibleError
from megatron_dynapipe.core.instructions import Forward, format_instruction
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.native import core
from megatron_dynapipe.core.orders import (
    NEVER,
    SCHEDULES,
    Policy,
    Rule,
    ScheduleSettings,
    filling_depths,
    gpipe,
    list_schedule,
    one_f_one_b,
    policies,
    schedule,
    sequences,
)
from megatron_dynapipe.core.simulate import simulate
from tests.core.list_schedule_oracle import list_schedule_by_rules
from tests.helpers.lists import verify_lists
from tests.helpers.plans import random_problem


def words(passes):
    return " ".join(map(format_instruction, passes))


def test_gpipe_and_1f1b():
    assert words(gpipe(random_problem(3, 2))[0]) == "F0 F1 F2 B0 B1 B2"
    assert words(gpipe(random_problem(2, 2, chunks=2))[1]) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert words(gpipe(random_problem(2, 2, forward_only=True))[0]) == "F0 F1"
    assert list(map(words, one_f_one_b(random_problem(5, 3)))) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]
    assert words(one_f_one_b(random_problem(1, 3))[0]) == "F0 B0"
    assert words(one_f_one_b(random_problem(3, 3), depths=(1, 1, 1))[0]) == "F0 B0 F1 B1 F2 B2"


@pytest.mark.parametrize("method", SCHEDULES)
def test_too_little_memory_names_the_stage_and_settings_are_checked(method):
    problem = random_problem(3, 2, memory_limit_bytes=15)
    with pytest.raises(InfeasibleError, match=r"stage . needs 0\.0000\d+ MB with this schedule, of 0\.0000\d+ MB"):
        schedule(problem, ScheduleSettings(method=method))
    for wrong, said in (
        ({"method": "zb"}, "expected a schedule among 1f1b, adaptive, gpipe, got 'zb'"),
        ({"search_evaluations": -1}, "expected at least 0 search evaluations, got -1"),
        ({"seed": -5}, r"expected a seed from 0 to 2\^64 - 1, got -5"),
    ):
        with pytest.raises(ConfigError, match=said):
            ScheduleSettings(**wrong)


def megatron_interleaved(rank, stages, chunks, micro_batches):
    """The order of Megatron's interleaved schedule for a number of micro-batches that its ranks divide."""
    total = micro_batches * chunks
    group = stages * chunks

    def at(k, forward):
        chunk = k % group // stages
        row = k // group * stages + k % stages
        return f"{'F' if forward else 'B'}{row}", chunk if forward else chunks - 1 - chunk

    warm_up = min((stages - rank - 1) * 2 + (chunks - 1) * stages, total)
    steps = [at(k, True) for k in range(warm_up)]
    for k in range(total - warm_up):
        steps += [at(warm_up + k, True), at(k, False)]
    steps += [at(k, False) for k in range(total - warm_up, total)]
    return " ".join(name + (f".{chunk}" if chunk else "") for name, chunk in steps)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 3)])
def test_interleaved_1f1b_is_megatrons_where_that_one_exists(stages, chunks, micro_batches):
    order = one_f_one_b(random_problem(micro_batches, stages, chunks=chunks))
    assert [words(passes) for passes in order] == [
        megatron_interleaved(rank, stages, chunks, micro_batches) for rank in range(stages)
    ]


def test_1f1b_holds_fewer_micro_batches_where_memory_is_short():
    problem = random_problem(8, 4)
    roomy = schedule(problem, ScheduleSettings(method="1f1b"))
    tight = max(problem.model_state_bytes) + 2 * problem.peak_bytes.max()
    limited = random_problem(8, 4, memory_limit_bytes=int(tight))
    found = schedule(limited, ScheduleSettings(method="1f1b"))
    assert max(found.peak_bytes) <= tight < max(roomy.peak_bytes)
    assert found.makespan_ns >= roomy.makespan_ns


ANY = {"forward_only": st.booleans(), "seed": st.integers(0, 10**6), "peak_covers_backward": st.booleans()}
LIMITS = (10**9, 60, 35, 21)  # 21 holds any micro-batch alone


def drawn(limits=LIMITS, *, fewest_stages=1, **more):
    """Problems of up to ten micro-batches under one of some memory limits."""
    sizes = {"micro_batches": st.integers(0, 10), "stages": st.integers(fewest_stages, 5)}
    return st.builds(random_problem, memory_limit_bytes=st.sampled_from(limits), **sizes, **ANY, **more)


problems = drawn()
with_messages = drawn((10**9, 80, 50, 35), message_bytes=st.sampled_from([1, 4]))
interleaved_problems = drawn((10**9, 120, 60, 35), fewest_stages=2, chunks=st.integers(2, 3))


@given(problem=problems | interleaved_problems | with_messages)
def test_list_schedules_run_everything_in_sequence_within_memory(problem):
    stages, chunks = problem.stages, problem.chunks
    shapes = ((((8, 1, 4),),) * (stages * chunks - 1),) * problem.micro_batches
    topology = PipelineTopology(stages=stages, chunks=chunks, shapes=shapes, forward_only=problem.forward_only)
    messages = problem.forward_message_bytes.any() or problem.backward_message_bytes.any()
    for policy in policies(problem)[:6]:
        order = list_schedule(problem, policy)
        full = policy.rule is not Rule.BACKWARD_FIRST
        forwards, backwards = sequences(problem.micro_batches, stages, chunks, full=full)
        if order is None:
            assert policy.rule is Rule.STRICT or (problem.memory_limit_bytes < 10**9 and (chunks > 1 or messages))
            continue
        for rank, passes in enumerate(order):
            assert tuple(step for step in passes if isinstance(step, Forward)) == forwards
            ran = tuple(step for step in passes if not isinstance(step, Forward))
            assert ran == (() if problem.forward_only else backwards)
            depth = np.cumsum([1 if isinstance(step, Forward) else -1 for step in passes], dtype=int)
            assert problem.forward_only or chunks > 1 or max(depth, default=0) <= policy.depths[rank]
        assert max(simulate(problem, order).peak_bytes) <= problem.memory_limit_bytes
        lists = lower(order, topology)
        verify_lists(lists, micro_batches=problem.micro_batches, chunks=chunks, forward_only=problem.forward_only)


@given(problem=problems | interleaved_problems, rule=st.sampled_from(Rule), extra=st.integers(-1, 4))
def test_list_scheduling_follows_its_rules(problem, rule, extra):
    filling = filling_depths(problem.stages, problem.chunks)
    policy = Policy(tuple(max(depth + extra, 1) for depth in filling), rule)
    assert list_schedule(problem, policy) == list_schedule_by_rules(problem, policy)


@given(
    problem=problems | interleaved_problems | with_messages,
    rule=st.sampled_from(Rule),
    gap=st.integers(-1, 4),
    choose=st.randoms(),
)
def test_a_schedule_that_begins_like_another_or_within_a_bound_takes_as_long(problem, rule, gap, choose):
    earlier = list(range(problem.micro_batches))
    if earlier:  # a search moves one, leaves some out and adds others
        earlier.insert(choose.randrange(len(earlier)), earlier.pop(choose.randrange(len(earlier))))
        earlier = earlier[: choose.randrange(1, len(earlier) + 1)] + earlier[: choose.randrange(2)]

    def makespan(**given):
        depths = np.array(filling_depths(problem.stages, problem.chunks), np.int64) + 1
        shape = problem.chunks, problem.model_state_bytes, problem.memory_limit_bytes, problem.forward_only
        policy = depths, int(rule), problem.peak_covers_backward, gap
        return core.list_schedule(problem.cost_arrays, *shape, *policy, **given)[0]

    alone = makespan()
    assert makespan(before=earlier) == alone
    assert makespan(before=earlier, bound=alone + 1) == alone == makespan(bound=alone + 1)
    assert makespan(bound=alone) == (NEVER if problem.micro_batches else 0)


@given(problem=problems | interleaved_problems)
def test_strict_list_scheduling_is_1f1b_where_memory_allows(problem):
    unlimited = random_problem(problem.micro_batches, problem.stages, chunks=problem.chunks, seed=7)
    policy = Policy(filling_depths(problem.stages, problem.chunks), Rule.STRICT)
    assert list_schedule(unlimited, policy) == one_f_one_b(unlimited)


@given(problem=problems | interleaved_problems.filter(lambda problem: problem.memory_limit_bytes == 10**9))
def test_adaptive_is_never_slower_than_1f1b(problem):
    found = schedule(problem, ScheduleSettings(method="adaptive"))
    one = schedule(problem, ScheduleSettings(method="1f1b"))
    assert found.makespan_ns <= one.makespan_ns


def noisy(problem, spread, random):
    """The same micro-batches with every pass up to `spread` faster or slower than predicted."""
    changed = {
        name: np.rint(getattr(problem, name) * random.uniform(1 - spread, 1 + spread, problem.forward_ns.shape))
        for name in ("forward_ns", "backward_ns")
    }
    fields = {name: getattr(problem, name) for name in type(problem).__slots__}
    return type(problem)(**fields | {name: value.astype(np.int64) for name, value in changed.items()})


@pytest.mark.parametrize("spread", [0.1, 0.3])
@pytest.mark.parametrize(("micro_batches", "stages"), [(8, 4), (24, 4), (24, 8)])
def test_adaptive_degrades_no_more_than_1f1b_when_times_differ_from_predicted(micro_batches, stages, spread):
    random = np.random.default_rng(5)
    mean, worst = np.zeros(2), np.zeros(2)
    for seed in range(5):
        problem = random_problem(micro_batches, stages, seed=seed)
        orders = [SCHEDULES[name](problem) for name in ("adaptive", "1f1b")]
        predicted = [simulate(problem, order).makespan_ns for order in orders]
        draws = [noisy(problem, spread, random) for _ in range(100)]
        times = np.array([[simulate(draw, order).makespan_ns for order in orders] for draw in draws])
        mean += times.mean(axis=0) / predicted / 5
        worst += times.max(axis=0) / predicted / 5
    # In hundredths of the predicted time; and in absolute time it stays ahead.
    assert mean[0] <= mean[1] + 0.02
    assert worst[0] <= worst[1] + 0.04
