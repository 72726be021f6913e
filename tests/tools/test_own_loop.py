"""Planned passes in your own training loop train as Megatron's schedule does, and refuse what they would get wrong."""

import itertools
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_dynapipe import planned
from megatron_dynapipe.core.errors import InstallationError
from tests.helpers.commands import run_python
from tests.helpers.layouts.compare import assert_close, errors_by_name, gradients_of
from tests.helpers.layouts.layout import Layout
from tests.helpers.processes import RanksFailedError, run_ranks
from tests.helpers.rehearsal import build, launch

EXAMPLE = Path(__file__).parents[2] / "examples/policy_loop.py"
RANKS = "tests.tools.loop_ranks"
TOLERANCE = 1e-6
OVER = {"attention": "megatron"}
"""Models of Megatron's own layers."""


def assert_same_outputs(found, expected):
    for name in ("old", "reference", "outputs"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def assert_in_order(rank, chunks):
    """Every micro-batch once on each chunk, in the order in which its rank was told."""
    for chunk in range(chunks):
        called = [indices for of, indices in rank["found"]["planned"]["calls"] if of == chunk]
        assert called == [tuple(each) for each in rank["seen"][2]]


def of(ranks, name):
    return gradients_of([rank["found"][name] for rank in ranks])


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param(Layout(stages=2, replicas=2, **OVER), {}, id="two stages, two replicas"),
        pytest.param(
            Layout(stages=2, chunks=2, overlap=True, **OVER), {"per_token": True}, id="virtual stages, losses per token"
        ),
        pytest.param(
            Layout(stages=2, tensor=2, sequence=True, **OVER),
            {"recompute": ("none", "full"), "memory_mb": 1.0},
            id="sequence parallel",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Layout(stages=2, chunks=2, replicas=2, overlap=True, **OVER), {}, id="all", marks=pytest.mark.slow
        ),
    ],
)
def test_a_loop_trains_as_by_megatrons_schedule(layout, settings):
    per_token = settings.get("per_token", False)
    # Over gloo, Megatron's own schedule of virtual stages takes messages of one shape for one another.
    one = layout if layout.chunks == 1 else replace(layout, stages=1, chunks=1, overlap=False)
    alone = run_ranks(f"{RANKS}:reference", one.ranks, {"layout": one, "per_token": per_token})
    ranks = run_ranks(f"{RANKS}:trained", layout.ranks, {"layout": layout, **settings})
    counts = {rank["place"][0]: len(rank["seen"][2]) for rank in ranks}
    assert len(set(counts.values())) == layout.replicas and max(counts.values()) > 1, "numbers of micro-batches differ"
    expected = gradients_of(alone)
    for name in ("planned", "awake"):
        assert_close(of(ranks, name), expected, TOLERANCE)
    if not per_token:
        assert max(errors_by_name(of(ranks, "divided by one"), expected).values()) > 0.1, "nothing would be noticed"
    outputs = {rank["place"]: rank for rank in alone if rank["outputs"]}
    for rank in ranks:
        assert_in_order(rank, layout.chunks)
        before, asleep, after = rank["groups"]
        assert before == asleep < after
        if rank["non_loss"]:
            assert_same_outputs(rank["found"]["planned"], outputs[rank["place"]])
            torch.testing.assert_close(rank["non_loss"], rank["found"]["planned"]["old"], rtol=0, atol=0)
    assert any(rank["non_loss"] for rank in ranks)


def run_example(rank, world_size):
    sys.path.insert(0, str(EXAMPLE.parent))
    return runpy.run_path(str(EXAMPLE))["main"]()


def test_the_example_learns():
    *others, gains = run_ranks(run_example, 2)
    assert others == [[]] and gains[-1] > gains[0] + 0.3


@pytest.mark.slow
@pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++")
def test_the_example_runs_on_rehearsed_devices():
    """The first lists through the host, then over NCCL, under the rules of GPUs."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(*launcher, EXAMPLE, timeout_s=280, **launch.environment(2))
    assert len(re.findall(r"update \d+: log-probabilities differ by (-?\d\.\d+)", done.stdout)) == 12


def test_the_door_of_loops_and_recipes():
    with pytest.raises(InstallationError, match="megatron-bridge"):
        planned(object())


def test_replicas_in_step_have_equal_numbers_of_micro_batches():
    layout = Layout(replicas=2, **OVER)
    ranks = run_ranks(f"{RANKS}:equal", 2, {"layout": layout})
    sizes = [[len(each) for each in rank["seen"][1]] for rank in ranks]
    assert sizes[0] == sizes[1] and len(sizes[0]) > 1
    for rank in ranks:
        assert sorted(itertools.chain(*rank["seen"][1])) == list(range(8))
        assert_same_outputs(rank["found"], rank["expected"])
        fewer, none, no_length = rank["refused"]
        assert "expected as many samples on every replica, got [7, 8]" in fewer
        assert "expected at least one sample" in none
        assert "expected the lengths of samples, in positions: 'str' object" in no_length
    assert_close(*(gradients_of([rank[name] for rank in ranks]) for name in ("found", "expected")), TOLERANCE)


def test_routers_replay_routes_and_replicas_share_experts():
    """Equal counts by themselves; backward passes take routes from a list, in which another order has other sizes."""
    ranks = run_ranks("tests.helpers.routed_loops:replayed", 4, {"layout": Layout(stages=2, replicas=2, **OVER)})
    assert len({tuple(rank["counts"]) for rank in ranks}) == 1 and min(ranks[0]["counts"]) > 1
    worst = {"planned": 0.0, "other routes": 0.0}
    for rank in ranks:
        expected = dict(zip(rank["names"], rank["found"]["megatron"], strict=True))
        for name in worst:
            found = dict(zip(rank["names"], rank["found"][name], strict=True))
            worst[name] = max(worst[name], *errors_by_name(found, expected).values())
    assert worst["planned"] <= TOLERANCE < 1e-2 < worst["other routes"]


def test_rows_that_are_not_those_said_are_refused_at_the_send():
    layout = Layout(stages=2, **OVER)
    with pytest.raises(RanksFailedError, match=r"(?s)expected to send tensors of shapes .*hint: .*wire_rows"):
        run_ranks(f"{RANKS}:wrong", 2, {"layout": layout})


REFUSED = {
    "nothing": "nothing",
    "fp8": "fp8 cannot be used with planned passes: its products want rows in multiples of 16",
    "weights later": "delay_wgrad_compute cannot be used with planned passes",
    "graphs": "cuda_graph_impl cannot be used with planned passes: a graph is captured for one shape",
    "a shared sequence": "expected wire_rows where ranks share a sequence",
    "replayed routes": "expected one mode of recomputation where routes are replayed, got none, selective, full",
    "a setting": "expected settings that the built models do not decide, got pipeline_parallel",
    "halves": "expected settings that the built models do not decide, got split_backward",
    "no setting": "got pieces",
    "memory": "stage 0 needs",
    "ran": "nothing",
    "number": "expected num_microbatches of the plan, 1 of forward passes alone, got 2 of forward passes alone",
    "training": "expected num_microbatches of the plan, 1 of forward passes alone, got 1 of training",
    "another model": "expected the models that plans are made for, got others",
    "iterators": "expected an iterator for each of 1 chunks, got 2",
    "early end": "expected as many micro-batches as planned, got an iterator that ends early",
    "argument": "planned passes do not know these arguments of a schedule: pg_collection",
    "nominal": "nothing",
    "no plan": "expected a plan of this step, got none",
    "asleep": "expected plans that are awake, got sleeping ones",
}


def test_what_would_go_wrong_is_refused():
    (found,) = run_ranks(f"{RANKS}:refused", 1)
    assert found.keys() == REFUSED.keys()
    for wanted, said in REFUSED.items():
        assert said in found[wanted], wanted
