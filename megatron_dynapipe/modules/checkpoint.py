"""Checkpoints through `torch.distributed.checkpoint`: every weight once under the whole model's name.

So a run may go on with other stages and replicas, and the weights can be read without any of this. PyTorch's own
format describes its contents in a pickle: load checkpoints that you trust.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.digests import check_digests, write_digests
from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.outputs import unwritten

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_EXTRA = "dynapipe."
_OPTIMIZER = "optimizer."


def save_checkpoint(
    path: Path, part: Part, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, float]
) -> None:
    """Write a part's weights, its share of the optimizer's state and some numbers. Every rank calls it.

    Raises:
        CheckpointError: on every rank: one cannot write its files.
    """
    control = part.ranks.control
    try:
        save(_tensors(part, optimizer, extra), checkpoint_id=path)
        control.run_on_all(lambda: write_digests(path) if control.rank == 0 else None)  # all ranks have written
    except (OSError, CheckpointException) as error:
        raise unwritten(path, error) from error


def load_checkpoint(
    path: Path, part: Part, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, float]
) -> dict[str, float]:
    """Read what `save_checkpoint` wrote, for whatever stages and replicas; gives back the numbers.

    Raises:
        DataError: on every rank alike: there is no such checkpoint, a file of it has changed, or it lacks a weight, or
            holds one that the model does not have.
    """
    tensors = _tensors(part, optimizer, extra)
    control = part.ranks.control
    names = {name for text in control.gather_texts(json.dumps(list(tensors))) for name in json.loads(text)}
    control.run_on_all(lambda: check_digests(path, rank=control.rank, ranks=control.size))  # which rank 0 has written
    try:
        load(tensors, checkpoint_id=path)
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise DataError(
            f"cannot read the checkpoint {path}: {reasons}",
            hint="give the folder of a checkpoint of the same model and the same kind of optimizer",
        ) from None
    if more := _saved_weights(path) - names:
        raise DataError(
            f"expected a checkpoint of this model, got {path}, which also holds {', '.join(sorted(more)[:4])}",
            hint="build the model that was saved, or give the folder of another checkpoint",
        )
    if optimizer is not None:
        state = _optimizer_state(part, optimizer)
        saved = part.saved_names()
        read = {key: _as(value, tensors[_renamed(key, saved)]) for key, value in state.items() if _is_kept(value)}
        set_optimizer_state_dict(part, optimizer, {**state, **read}, options=_OPTIONS)
    return {key: float(tensors[_EXTRA + key]) for key in extra}


def _saved_weights(path: Path) -> set[str]:
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name for name in names if not name.startswith((_OPTIMIZER, _EXTRA))}


def _tensors(
    part: Part, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Everything to be written or read, as tensors: other values would be written by rank 0 alone."""
    saved = part.saved_names()
    tensors: dict[str, Any] = {saved.get(key, key): value for key, value in get_model_state_dict(part).items()}
    if optimizer is not None:
        state = _optimizer_state(part, optimizer)
        tensors |= {_renamed(key, saved): _tensor(value) for key, value in state.items() if _is_kept(value)}
    return tensors | {_EXTRA + key: torch.tensor(value, dtype=torch.float64) for key, value in extra.items()}


def _optimizer_state(part: Part, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(part, optimizer, options=_OPTIONS))


def _renamed(key: str, saved: Mapping[str, str]) -> str:
    """The key of a part of the optimizer's state, in which a weight's name stands between two others."""
    kind, _, rest = key.partition(".")
    name, _, word = rest.rpartition(".")
    return f"{_OPTIMIZER}{kind}.{saved.get(name, name)}.{word}"


def _is_kept(value: Any) -> bool:
    """Tensors and numbers are; switches and names stay as the program has them."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_kept, value))
    return isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)


def _as(like: Any, tensor: torch.Tensor) -> Any:
    """A tensor as a value of the type that it was made of."""
    if isinstance(like, torch.Tensor):
        return tensor
    if isinstance(like, Sequence):
        return type(like)(tensor.tolist())  # type: ignore[call-arg]
    return type(like)(tensor.item())
