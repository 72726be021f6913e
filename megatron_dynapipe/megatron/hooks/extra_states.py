"""States of Transformer Engine's layers that a checkpoint of local layers, or of `convert`, lacks.

Every layer of Transformer Engine has one, in which fp8 keeps its scales; in other precisions it is empty. Megatron asks
a checkpoint for all of them, and stops at the first that is missing.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from megatron_dynapipe.outputs import say

SUFFIX = "_extra_state"


def with_empty_states(load: Callable[..., Any]) -> Callable[..., Any]:
    """`dist_checkpointing.load` that leaves empty states as they are where the checkpoint has none of them."""

    @functools.wraps(load)
    def load_what_is_there(
        sharded_state_dict: dict[str, Any], checkpoint_dir: str, *arguments: object, **keywords: object
    ) -> Any:
        empty = {
            name: _empty_states(entries)
            for name, entries in sharded_state_dict.items()
            if name.startswith("model") and isinstance(entries, Mapping)
        }
        if not any(empty.values()):
            return load(sharded_state_dict, checkpoint_dir, *arguments, **keywords)
        saved = load_sharded_metadata(str(checkpoint_dir))
        lacking = {
            name: {key: state for key, state in states.items() if state.unique_key not in saved}
            for name, states in empty.items()
        }
        asked = dict(sharded_state_dict)
        for name, states in lacking.items():
            asked[name] = {key: entry for key, entry in asked[name].items() if key not in states}
        loaded = load(asked, checkpoint_dir, *arguments, **keywords)
        for name, states in lacking.items():
            loaded[name].update({key: state.data for key, state in states.items()})
        _tell(sum(map(len, lacking.values())))
        return loaded

    return load_what_is_there


def _empty_states(entries: Mapping[str, Any]) -> dict[str, ShardedObject]:
    return {
        key: entry
        for key, entry in entries.items()
        if key.endswith(SUFFIX)
        and isinstance(entry, ShardedObject)
        and isinstance(entry.data, torch.Tensor)
        and not entry.data.numel()
    }


def _tell(count: int) -> None:
    if count and parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
        say(
            f"the checkpoint was saved with local layers: {count} states of Transformer Engine's layers begin empty, as"
            " they are without fp8"
        )
