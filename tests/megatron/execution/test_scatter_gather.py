"""Training with messages sharded over tensor-parallel ranks: bitwise the same as without, at a shard's bytes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.helpers import entry_scripts
from tests.helpers.layouts.layout import Layout, table
from tests.helpers.processes import run_ranks

LAYOUTS = ("gpt 2x2x1", "gpt 2x2x1, two chunks, overhead 0.5", "t5 2x2x1, recompute full and none *", "t5 2x4x1, bf16")


def train(*, rank: int, world_size: int, layout: Layout) -> dict:
    """Losses and gradients of two steps, and what was sent in them (warming up sends one element per connection)."""
    from tests.helpers.layouts import trainer

    sent: list[int] = []
    isend = dist.isend

    def counted(tensor: torch.Tensor, *rest: object, **named: object):
        sent.append(tensor.nbytes)
        return isend(tensor, *rest, **named)

    dist.isend = counted
    result = trainer.train(layout, steps=2)
    kept = {name: result[name] for name in ("losses", "norms", "gradients")}
    return {"learned": kept, "sent": sent}


@pytest.mark.parametrize("wanted", table(LAYOUTS))
def test_sharded_messages_change_nothing_but_their_size(wanted):
    whole, sharded = (
        run_ranks(train, wanted.ranks, {"layout": replace(wanted, scatter_gather=choice)}) for choice in ("off", "on")
    )
    for one, other in zip(whole, sharded, strict=True):
        assert one["sent"] and [2 * size for size in other["sent"]] == one["sent"]
        assert one["learned"]["losses"] == other["learned"]["losses"]
        assert one["learned"]["norms"] == other["learned"]["norms"]
        for (name, *place, gradient), (other_name, *other_place, other_gradient) in zip(
            one["learned"]["gradients"], other["learned"]["gradients"], strict=True
        ):
            assert (name, place) == (other_name, other_place)
            assert gradient.equal(other_gradient), name


def test_a_run_divides_messages_between_nodes_on_its_own(data, tmp_path):
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --train-iters 3"
    said = "messages between stages are divided over 2 tensor-parallel ranks, where that is faster"
    losses = {}
    links = "intra-node-gbps: 4800\ninter-node-gbps: 100\nintra-node-latency-us: 0\ninter-node-latency-us: 4000\n"
    cluster = tmp_path / "two_nodes.yaml"
    cluster.write_text(f"device-memory-mb: 4000\ndevices-per-node: 2\n{links}")
    for name, choice in {"two nodes": "", "off": "--dynapipe-scatter-gather off"}.items():
        runs = entry_scripts.train(
            "gpt", data, f"{flags} --dynapipe-cluster {cluster} {choice}", ranks=4, report=tmp_path / name
        )
        assert (said in runs[0]["stdout"]) == (name == "two nodes")
        losses[name] = list(runs[-1]["losses"].values())
    assert len(losses["off"]) == 3
    assert losses["two nodes"] == pytest.approx(losses["off"], rel=1e-4)
