"""Overlapped reductions and gathers where replicas have different numbers of micro-batches, or none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_dynapipe.core.instructions import Backward, Forward
from tests.helpers.layouts.layout import on_ranks, table

LAYOUTS = ("gpt 1x2x2, two chunks", "t5 1x1x2 *")


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_a_replica_without_micro_batches_joins_reductions_and_gathers(layout):
    """Megatron gathers parameters in forward passes (`--overlap-param-gather`), of which one replica has none.

    With a bucket for each parameter, those of a pass become ready in another order than that of the buckets.
    """
    layout = replace(layout, distributed_optimizer=True, overlap=True, bucket_size=1)
    at_once = on_ranks("probes.train_one_replica", layout)
    in_passes = on_ranks("probes.train_one_replica", replace(layout, gather=True))
    assert len(set(in_passes[-1])) == 3 and in_passes == at_once


def gathers_of(words: str, *, at_once: bool = False) -> list[str]:
    """What two chunks' gathers do while passes run: `start` by Megatron's function, `join` of a bucket."""
    from megatron_dynapipe.megatron.execution.forward_backward import _ParameterGathers

    found: list[str] = []

    def model(chunk: int) -> SimpleNamespace:
        buckets = [
            SimpleNamespace(finish_param_sync=lambda name=f"join {chunk}.{number}": found.append(name))
            for number in range(2)
        ]
        hooks = {"use_forward_hook": True, "remove_forward_pre_hook_handles": {1: 1}}
        return SimpleNamespace(bucket_groups=buckets, parameters=tuple, **hooks)

    starts = [lambda _, name=f"start {chunk}": found.append(name) for chunk in range(3)]
    passes = [(Forward if word[0] == "F" else Backward)(int(word[1]), int(word[3])) for word in words.split()]
    config = SimpleNamespace(param_sync_func=starts)
    gathers = _ParameterGathers(config, list(map(model, range(3))), passes, at_once=at_once, forward_only=False)
    gathers.begin()
    for each in passes:
        if isinstance(each, Forward):
            gathers.before_forward(each)
            found.append(f"F{each.micro_batch}.{each.chunk}")
    return found


def test_aligned_gathers_start_a_chunk_ahead():
    """Megatron's hooks start none ahead then, and every gather would be waited for where it starts."""
    passes = "F0.0 F1.0 F0.1 F1.1 F0.2 B0.2 F1.2"
    assert gathers_of(passes) == ["start 0", "start 1", "F0.0", "F1.0", "start 2", "F0.1", "F1.1", "F0.2", "F1.2"]


def test_all_replicas_gather_before_their_passes_where_one_has_none():
    joins = [f"join {chunk}.{bucket}" for chunk in range(3) for bucket in (1, 0)]
    assert gathers_of("", at_once=True) == joins
    assert gathers_of("F0.0 F0.1 F0.2", at_once=True) == [*joins, "F0.0", "F0.1", "F0.2"]
