"""Keys and values of a sample's earlier pieces, kept in an attention until the later pieces' backward passes are done.

    forward    piece 0: keeps its keys k0           piece 1: attends to k0 and its own, keeps k1
    backward   piece 1: adds its gradient of k0     piece 0: gradient of k0 = its own + what has been added

What is kept shares memory with the layer's own keys where those stay for the backward pass, and is a copy of them where
they are recomputed. Backward passes of later pieces come first (`ways.chains`), so that the sum is complete when the
piece's own backward pass takes it up. Nothing of this crosses a stage.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dynapipe.core.errors import ExecutionError
from megatron_dynapipe.costing.pieces import SUMMED_IN_FP32
from megatron_dynapipe.data.segments import CutSegment

_ANCHOR = torch.empty(0, requires_grad=True)
"""An input that makes autograd run the backward of `_Read`, whose tensors are no leaves; it never gets a gradient."""


@dataclass(slots=True, eq=False)
class KeptPiece:
    """One piece's keys and values [positions, groups, channels], and their gradients from later pieces so far.

    Attributes:
        added: later pieces whose gradients have been added up.
    """

    sample: int
    start: int
    key: Tensor
    value: Tensor
    gradients: tuple[Tensor, ...] = ()
    added: int = 0

    def add(self, *gradients: Tensor) -> None:
        """Add a later piece's gradients: in fp32 where they are many, since half precision rounds after each."""
        self.added += 1
        if self.added == 1:
            self.gradients = gradients
            return
        if self.added == SUMMED_IN_FP32:
            self.gradients = tuple(gradient.float() for gradient in self.gradients)
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total.add_(gradient)

    def read(self) -> tuple[Tensor, Tensor]:
        """Its keys and values for a later piece, whose backward pass adds their gradients here."""
        read: tuple[Tensor, Tensor] = _Read.apply(self, _ANCHOR)
        return read


class _Read(torch.autograd.Function):
    """A kept piece's keys and values."""

    @staticmethod
    def forward(ctx: Any, piece: KeptPiece, anchor: Tensor) -> tuple[Tensor, Tensor]:
        ctx.piece = piece
        return piece.key.view_as(piece.key), piece.value.view_as(piece.value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.piece.add(*gradients)
        return None, None


class KeptKeys:
    """The keys and values that one attention keeps of the micro-batches in flight."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], KeptPiece] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def clear(self) -> None:
        """Drop what an iteration that did not end has left."""
        self._pieces.clear()

    def before(self, cut: CutSegment) -> list[KeptPiece]:
        """The pieces that a piece attends to in addition to itself, in order.

        Raises:
            ExecutionError: they do not cover the positions before it: their forward passes have not run here.
        """
        its = [
            piece
            for (sample, start), piece in sorted(self._pieces.items())
            if sample == cut.sample and start < cut.start
        ]
        positions = sum(len(piece.key) for piece in its)
        if positions != cut.start:
            raise ExecutionError(
                f"expected keys of {cut.start} earlier positions of sample {cut.sample}, found {positions}",
                hint="a plan that `megatron-dynapipe verify` accepts runs the pieces of a sample in order",
            )
        return its

    def keep(
        self, key: Tensor, value: Tensor, offsets: Sequence[int], cuts: Mapping[int, CutSegment]
    ) -> tuple[Tensor, Tensor]:
        """A row's keys and values, whose gradients are to take up later pieces' gradients.

        Args:
            key: [t, groups, channels].
            value: likewise.
            offsets: where the row's segments begin.
            cuts: those that are pieces.
        """
        places = []
        for segment, cut in cuts.items():
            if not cut.followed:
                continue
            first = offsets[segment]
            end = offsets[segment + 1]
            name = (cut.sample, cut.start)
            if name not in self._pieces:  # else this is the recomputation
                self._pieces[name] = KeptPiece(*name, key=_kept(key[first:end]), value=_kept(value[first:end]))
            places.append((slice(first, end), name))
        if not places or not torch.is_grad_enabled():
            return key, value
        joined: tuple[Tensor, Tensor] = _TakeUp.apply(key, value, self, places)
        return joined

    def take_up(self, name: tuple[int, int], gradients: Sequence[Tensor], place: slice) -> None:
        """Add a piece's gradients to its row's, and drop it."""
        for gradient, added in zip(gradients, self._pieces.pop(name).gradients, strict=False):
            gradient[place] += added


class _TakeUp(torch.autograd.Function):
    """The identity; backwards it adds the gradients of later pieces."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, kept: KeptKeys, places: Sequence[tuple[slice, tuple[int, int]]]
    ) -> tuple[Tensor, Tensor]:
        ctx.kept = kept
        ctx.places = places
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        copies = [gradient.clone() for gradient in gradients]
        for place, name in ctx.places:
            ctx.kept.take_up(name, copies, place)
        return (*copies, None, None)


def _kept(part: Tensor) -> Tensor:
    """Keys or values: of the same memory where the pass keeps it anyway, else a copy of this part alone."""
    return part.detach() if torch.is_grad_enabled() else part.clone()


@contextlib.contextmanager
def joined_again(*joined: tuple[Tensor, Sequence[Tensor]]) -> Iterator[None]:
    """Joined tensors that operations save are not kept but joined again in the backward pass, from parts that are.

    Args:
        joined: a tensor that `torch.cat` has made, and its parts.
    """
    parts = {tensor.untyped_storage().data_ptr(): [part.detach() for part in of] for tensor, of in joined}

    def pack(tensor: Tensor) -> Any:
        its = parts.get(tensor.untyped_storage().data_ptr())
        return tensor if its is None else (its, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        its, *form = saved
        return torch.cat(its).as_strided(*form)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def kept_keys_of(models: Sequence[nn.Module]) -> list[KeptKeys]:
    """What the attentions of model chunks keep."""
    kept = (getattr(module, "kept_keys", None) for model in models for module in model.modules())
    return [keys for keys in kept if isinstance(keys, KeptKeys)]


def clear_kept_keys(models: Sequence[nn.Module]) -> None:
    """Drop what the attentions of model chunks have kept."""
    for keys in kept_keys_of(models):
        keys.clear()
