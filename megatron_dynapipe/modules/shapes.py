"""Shapes at a boundary, learned once: what a stage of the user's own receives and sends for a batch of given shapes.

    stage 0                         stage 1                         stage 2
    runs without memory ──shapes──► runs without memory ──shapes──► runs without memory

If all stages have met a step's shapes before, they exchange none. A stage that has not says so in the step's agreement;
then all stages learn them together, one stage after another: each tells all ranks what it sends, or why it cannot run.
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

from megatron_dynapipe.core.errors import ConfigError, ExecutionError
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.record import TensorMeta

_MOST_SHAPES = 4096


class Structure(msgspec.Struct, frozen=True):
    """A value that crosses a boundary: tensors and constants inside tuples, lists and dicts.

    Attributes:
        spec: the tree as `torch.utils._pytree` writes it.
        leaves: its tensors and constants.
    """

    spec: str
    leaves: tuple[TensorMeta | bool | int | float | str | None, ...]

    @classmethod
    def of(cls, value: object) -> Self:
        """Describe what a stage returns; raises ConfigError for values that cannot cross a boundary."""
        leaves, spec = tree_flatten(_plain(value))
        return cls(treespec_dumps(spec), tuple(map(_leaf, leaves)))

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
        if (other := Structure.of(value)) != self:
            raise ExecutionError(f"expected the stage to return {self} for this batch, as it did before, got {other}")
        return [leaf for leaf in tree_leaves(_plain(value)) if isinstance(leaf, torch.Tensor)]


def _plain(value: object) -> object:
    """A value whose tuples, lists and dicts are of Python's own types."""
    match value:
        case tuple():
            return tuple(map(_plain, value))
        case list():
            return list(map(_plain, value))
        case dict():
            return {key: _plain(entry) for key, entry in value.items()}
    return value


def _leaf(value: Any) -> TensorMeta | bool | int | float | str | None:
    match value:
        case torch.Tensor():
            meta = TensorMeta.of(value)
            return meta._replace(shape=tuple(map(int, meta.shape)))
        case None | bool() | int() | float() | str():
            return value
    raise ConfigError(
        f"a stage returns a {type(value).__name__}, which cannot cross to the next one",
        hint="return tensors, numbers, strings, and tuples, lists and dicts of them",
    )


Run = Callable[[Structure | None], Structure | None]
"""Gives what a stage sends from what it receives; None at the pipeline's ends."""


class ShapeTracker:
    """Structures that cross a stage's boundaries, by the shapes of the micro-batch.

    Attributes:
        learned: how many shapes of micro-batches this rank has learned so far.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: OrderedDict[Hashable, tuple[Structure | None, Structure | None]] = OrderedDict()
        self.learned = 0

    def knows(self, key: Hashable) -> bool:
        """Whether micro-batches of this key have been met."""
        return key in self._known

    def known(self, key: Hashable) -> tuple[Structure | None, Structure | None]:
        """The structures received and sent for a micro-batch that has been met."""
        self._known.move_to_end(key)
        return self._known[key]

    def learn(self, runs: Mapping[Hashable, Run]) -> None:
        """Learn a step's shapes: `runs` by key, in one order on all stages. Every rank calls it at the same point.

        Raises:
            ConfigError: on every rank of the pipeline: a stage cannot run what it receives.
        """
        ranks = self._ranks
        keys = list(runs)
        crossing: list[list[_Said]] = []
        for stage in range(ranks.stages):
            received = crossing[-1] if crossing else [None] * len(keys)
            sent: list[_Said] = []
            if stage == ranks.stage:
                sent = [self._sent(runs[key], value) for key, value in zip(keys, received, strict=True)]
            texts = ranks.control.gather_texts(msgspec.json.encode(sent).decode())
            crossing.append(msgspec.json.decode(texts[ranks.pipeline[stage]], type=list[_Said]))
        failures = []
        for key, said in zip(keys, zip(*crossing, strict=True), strict=True):
            if failed := next((text for text in said if isinstance(text, str)), None):
                failures.append(failed)
                continue
            self.learned += key not in self._known
            self._known[key] = said[ranks.stage - 1] if ranks.stage else None, said[ranks.stage]
        self._forget(keys)
        if failures:
            raise ConfigError(failures[0])

    def _forget(self, keys: Sequence[Hashable]) -> None:
        """Drop the oldest shapes, but none of a step's."""
        for key in set(keys) & self._known.keys():
            self._known.move_to_end(key)
        while len(self._known) > max(_MOST_SHAPES, len(keys)):
            self._known.popitem(last=False)

    def _sent(self, run: Run, received: "_Said") -> "_Said":
        """The structure that this stage sends, or why it cannot run what it receives."""
        if isinstance(received, str):
            return received
        try:
            return run(received)
        except Exception as error:  # noqa: BLE001  (whatever it is, all stages must raise)
            return f"stage {self._ranks.stage} cannot run a batch of these shapes: {error}"


_Said = Structure | str | None
"""The tensors that a stage sends, or the error of one that cannot run; None after the last stage."""


def output_structure(
    module: nn.Module,
    batch: Mapping[str, Any],
    device: torch.device,
    *,
    received: Structure | None = None,
    autocast: torch.dtype | None = None,
) -> Structure:
    """The structure of a module's output, run on tensors without memory."""
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if autocast is not None:
            stack.enter_context(torch.autocast(device.type, autocast))
        named = {k: torch.empty_like(v, device=device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        empty = [
            torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=device, requires_grad=m.differentiable)
            for m in (received.tensors if received else ())
        ]
        first = () if received is None else (received.fill(empty),)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors}
        return Structure.of(torch.func.functional_call(module, weights, first, named))
