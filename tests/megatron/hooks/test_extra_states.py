"""Checkpoints of local layers lack states of Transformer Engine's, which loads them: empty ones alone are left out.

That such runs go on as on the CPU: tests/rehearsal/test_training.py.
"""

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_dynapipe.megatron.hooks import extra_states


def state(key: str, data: Any) -> ShardedObject:
    return ShardedObject(key, data, (1,), (0,))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What a checkpoint is asked for that has one state, and stops at others."""
    monkeypatch.setattr(extra_states, "load_sharded_metadata", lambda _: {"fc1._extra_state/shard_0_1": None})
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda: 0)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_rank", lambda: 0)
    return []


def test_empty_states_that_a_checkpoint_lacks_are_left_out_and_told(asked, capsys):
    def load(wanted: dict[str, Any], folder: str, *, strict: str) -> dict[str, Any]:
        asked.append(sorted(wanted["model"]))
        return {"model": {"weight": "loaded", "fc1._extra_state": "loaded"}, "args": strict}

    empty = torch.empty(0, dtype=torch.uint8)
    entries = {"weight": "entry"} | {f"{n}._extra_state": state(f"{n}._extra_state", empty) for n in ("fc1", "norm")}
    given = {"model": entries, "args": "entry"}
    loaded = extra_states.with_empty_states(load)(given, "folder", strict="raise_all")
    assert asked == [["fc1._extra_state", "weight"]]
    assert loaded["model"]["weight"] == loaded["model"]["fc1._extra_state"] == "loaded"
    assert loaded["model"]["norm._extra_state"] is empty and loaded["args"] == "raise_all"
    assert given["model"] is entries and len(entries) == 3
    assert capsys.readouterr().out.startswith("the checkpoint was saved with local layers: 1 states of")


def test_states_that_hold_something_are_asked_for(asked, capsys):
    def load(wanted: dict[str, Any], folder: str) -> dict[str, Any]:
        asked.append(sorted(wanted["model"]))
        return {"model": {}}

    scales = state("norm._extra_state", torch.ones(4, dtype=torch.uint8))
    extra_states.with_empty_states(load)({"model": {"norm._extra_state": scales}}, "folder")
    assert asked == [["norm._extra_state"]]
    assert not capsys.readouterr().out
