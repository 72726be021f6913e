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
from typing import Any, Self

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from megatron_dynapipe.errors import ConfigError, ExecutionError
from megatron_dynapipe.modules.boundary import Boundary
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.plan.instructions import TensorShape

_MOST_SHAPES = 4096
_FAILED = "failed: "


class TensorMeta(msgspec.Struct, frozen=True):
    """A tensor inside what a stage sends."""

    shape: TensorShape
    dtype: str
    differentiable: bool


class Structure(msgspec.Struct, frozen=True):
    """What crosses a boundary: tensors inside tuples, lists and dicts, and constants beside them.

    Attributes:
        spec: the tree as `torch.utils._pytree` writes it.
        leaves: its tensors and constants.
    """

    spec: str
    leaves: tuple[TensorMeta | bool | int | float | str | None, ...]

    @classmethod
    def of(cls, value: Any) -> Self:
        """That of what a stage returns; raises ConfigError for values that cannot cross a boundary."""
        leaves, spec = tree_flatten(value)
        try:
            return cls(treespec_dumps(spec), tuple(map(_leaf, leaves)))
        except NotImplementedError as error:
            raise ConfigError(f"a stage returns {type(value).__name__}: {error}", hint=_CAN_CROSS) from error

    @property
    def tensors(self) -> list[TensorMeta]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value, given its tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, treespec_loads(self.spec))

    def flatten(self, value: Any) -> list[torch.Tensor]:
        """The tensors of what a stage returned; raises ExecutionError where it is not of this structure."""
        if (found := Structure.of(value)) != self:
            raise ExecutionError(f"expected the stage to return {self} for this batch, as it did before, got {found}")
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def boundary(self) -> Boundary:
        """What crosses, for the executor."""
        return Boundary(
            shapes=tuple(meta.shape for meta in self.tensors),
            dtypes=tuple(getattr(torch, meta.dtype) for meta in self.tensors),
            differentiable=tuple(meta.differentiable for meta in self.tensors),
        )


_CAN_CROSS = "return tensors, numbers, strings, and tuples, lists and dicts of them"


def _leaf(value: Any) -> TensorMeta | bool | int | float | str | None:
    match value:
        case torch.Tensor():
            differentiable = value.requires_grad and value.is_floating_point()
            name = str(value.dtype).removeprefix("torch.")
            return TensorMeta(tuple(int(n) for n in value.shape), name, differentiable)
        case None | bool() | int() | float() | str():
            return value
    raise ConfigError(f"a stage returns a {type(value).__name__}, which cannot cross to the next one", hint=_CAN_CROSS)


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
        empty = [
            torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=device, requires_grad=m.differentiable)
            for m in (received.tensors if received else ())
        ]
        first = () if received is None else (received.fill(empty),)
        held = [*module.named_parameters(), *module.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held}
        return Structure.of(torch.func.functional_call(module, weights, first, given))
