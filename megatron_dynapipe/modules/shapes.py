"""Shapes at a boundary, learned once: what a stage of the user's own receives and sends for a batch of given shapes.

    stage 0                         stage 1                          stage 2
    runs without memory ──shapes──► runs without memory ──shapes──► runs without memory

Both sides of a boundary know the micro-batch's own shapes, which all ranks of a pipeline have agreed on. Where all of
them have met these shapes before, nothing is sent. Where any has not, it says so in the step's agreement, all tell each
other which shapes are new to them, and every stage exchanges each shape that is new to any stage, in one order: no side
can wait for a message that the other does not send, and none sends one that is not received. A stage that fails passes
that on in place of a structure.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dynapipe.errors import ConfigError, ExecutionError
from megatron_dynapipe.modules.boundary import Boundary
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.plan.instructions import TensorShape

_MOST_SHAPES = 4096
_FAILED = "failed: "


class TensorMeta(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor inside what a stage sends."""

    shape: TensorShape
    dtype: str
    differentiable: bool


class Items(msgspec.Struct, frozen=True, tag="items"):
    """A tuple or list."""

    kind: str
    items: "tuple[Structure, ...]"


class Mapped(msgspec.Struct, frozen=True, tag="mapped"):
    """A dict."""

    items: "dict[str, Structure]"


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """What is no tensor."""

    value: bool | int | float | str | None


Structure = TensorMeta | Items | Mapped | Constant
"""What crosses a boundary: tensors inside tuples, lists and dicts, and constants beside them."""

Run = Callable[[Structure | None], Structure | None]
"""From what a stage receives to what it sends; None at the pipeline's ends."""

_decoder = msgspec.json.Decoder(Structure)


class ShapeTracker:
    """What crosses one boundary, by the shapes of the micro-batch.

    Args:
        ranks: this rank's place.

    Attributes:
        exchanges: how often this rank has received a structure from the stage before it, or sent one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: OrderedDict[Hashable, tuple[Structure | None, Structure | None]] = OrderedDict()
        self.exchanges = 0

    def knows(self, key: Hashable) -> bool:
        """Whether micro-batches of this key have been met."""
        return key in self._known

    def known(self, key: Hashable) -> tuple[Structure | None, Structure | None]:
        """What is received and what is sent for a micro-batch that has been met."""
        self._known.move_to_end(key)
        return self._known[key]

    def learn(self, runs: Mapping[Hashable, Run]) -> None:
        """Exchange what is new to any stage of this pipeline. Every rank of the job calls it at the same point.

        Args:
            runs: for every key of the step's micro-batches, in an order that all stages share.

        Raises:
            ConfigError: a stage cannot run what it receives; those after it say which it was.
        """
        keys, failure = list(runs), None
        for place in self._new_to_any(keys):
            try:
                self._known[keys[place]] = self._exchange(runs[keys[place]])
            except ConfigError as error:  # the other stages exchange the keys that follow, so this one does too
                failure = failure or error
        for key in set(keys) & self._known.keys():  # what this step needs goes last
            self._known.move_to_end(key)
        while len(self._known) > max(_MOST_SHAPES, len(keys)):
            self._known.popitem(last=False)
        if failure is not None:
            raise failure

    def _new_to_any(self, keys: Sequence[Hashable]) -> list[int]:
        """Places of the keys that a stage of this pipeline has not met."""
        ranks = self._ranks
        told = ranks.control.gather_texts("".join("01"[key not in self._known] for key in keys))
        return [place for place in range(len(keys)) if any(told[rank][place] == "1" for rank in ranks.pipeline)]

    def _exchange(self, run: Run) -> tuple[Structure | None, Structure | None]:
        """Receive one structure and send one, whatever happens in between."""
        ranks, text = self._ranks, ""
        if ranks.stage:
            self.exchanges += 1
            text = ranks.control.receive_text(ranks.pipeline[ranks.stage - 1])
        if text.startswith(_FAILED):
            self._pass_on(text)
            raise ConfigError(text.removeprefix(_FAILED))
        received = _decoder.decode(text) if text else None
        try:
            sent = run(received)
        except Exception as error:
            found = f"stage {ranks.stage} cannot run a batch of these shapes: {error}"
            self._pass_on(_FAILED + found)
            raise ConfigError(found) from error
        self._pass_on(msgspec.json.encode(sent).decode())
        return received, sent

    def _pass_on(self, text: str) -> None:
        if self._ranks.stage < self._ranks.stages - 1:
            self.exchanges += 1
            self._ranks.control.send_text(text, self._ranks.pipeline[self._ranks.stage + 1])


def structure_of(value: Any) -> Structure:
    """The structure of what a stage returns; raises ConfigError for values that cannot cross a boundary."""
    match value:
        case torch.Tensor():
            differentiable = value.requires_grad and value.is_floating_point()
            name = str(value.dtype).removeprefix("torch.")
            return TensorMeta(tuple(int(n) for n in value.shape), name, differentiable)
        case tuple() | list():
            kind = "list" if isinstance(value, list) else "tuple"
            return Items(kind, tuple(map(structure_of, value)))
        case dict():
            return Mapped({key: structure_of(each) for key, each in value.items()})
        case None | bool() | int() | float() | str():
            return Constant(value)
    raise ConfigError(
        f"a stage returns a {type(value).__name__}, which cannot cross to the next one",
        hint="return tensors, numbers, strings, and tuples, lists and dicts of them",
    )


def output_structure(
    module: nn.Module,
    batch: Mapping[str, Any],
    device: torch.device,
    *,
    received: Structure | None = None,
    autocast: torch.dtype | None = None,
) -> Structure:
    """What a module returns, found on tensors without memory.

    Args:
        module: a stage's.
        batch: its arguments by name.
        device: where the module is.
        received: its first argument, if it gets one of the stage before it.
        autocast: dtype that operations are cast to, if any.
    """
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast))
        given = {k: torch.empty_like(v, device=device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        metas = [] if received is None else tensors_in(received)
        empty = [
            torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=device, requires_grad=m.differentiable)
            for m in metas
        ]
        first = () if received is None else (fill(received, empty),)
        held = [*module.named_parameters(), *module.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held}
        return structure_of(torch.func.functional_call(module, weights, first, given))


def tensors_in(structure: Structure | None) -> list[TensorMeta]:
    """Its tensors, in order."""
    match structure:
        case TensorMeta():
            return [structure]
        case Items():
            return [meta for each in structure.items for meta in tensors_in(each)]
        case Mapped():
            return [meta for each in structure.items.values() for meta in tensors_in(each)]
    return []


def fill(structure: Structure, tensors: list[torch.Tensor]) -> Any:
    """The value of a structure, given its tensors; they are taken from the front."""
    match structure:
        case TensorMeta():
            return tensors.pop(0)
        case Items():
            items = [fill(each, tensors) for each in structure.items]
            return items if structure.kind == "list" else tuple(items)
        case Mapped():
            return {key: fill(each, tensors) for key, each in structure.items.items()}
        case Constant():
            return structure.value


def flatten(value: Any, structure: Structure) -> list[torch.Tensor]:
    """The tensors of what a stage returned; raises ExecutionError where it is not of the structure."""
    if (found := structure_of(value)) != structure:
        raise ExecutionError(f"expected the stage to return {structure} for this batch, as it did before, got {found}")
    leaves: list[torch.Tensor] = []
    pending = [value]
    while pending:
        each = pending.pop(0)
        if isinstance(each, torch.Tensor):
            leaves.append(each)
        elif isinstance(each, tuple | list):
            pending = [*each, *pending]
        elif isinstance(each, dict):
            pending = [*each.values(), *pending]
    return leaves


def boundary_of(structure: Structure) -> Boundary:
    """What crosses, as the executor is told of it."""
    metas = tensors_in(structure)
    return Boundary(
        shapes=tuple(meta.shape for meta in metas),
        dtypes=tuple(getattr(torch, meta.dtype) for meta in metas),
        differentiable=tuple(meta.differentiable for meta in metas),
    )
