"""Writing down what happens between modules: operations, calls of whole modules, and the values that pass."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.symbols import expression_of

_IN_PLACE = {
    *("__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that the batch or a node made, by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on the batch's sizes."""

    expression: sympy.Expr


class Device(enum.Enum):
    """The device that the stage is on."""

    STAGE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One operation, or one call of a whole module.

    Attributes:
        segment: between which cuts it stands.
        target: the function, or the module's name.
        args, kwargs: what it was given: constants, and `Value`, `Weight`, `Size`, `Device` within them.
        outputs: number of every tensor that it returned, and the way to it inside what it returned.
        mutates: it changes its first argument, which stands for what it returned.
        with_grad: gradients were enabled.
    """

    segment: int
    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, tuple[Any, ...]], ...]
    mutates: bool
    with_grad: bool

    @property
    def name(self) -> str:
        """Of the module or the function."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))

    @property
    def in_place(self) -> bool:
        """Whether an operation changes what it is given."""
        dunder = self.name.startswith("__")
        return self.mutates or (self.name in _IN_PLACE if dunder else self.name.endswith("_"))

    @property
    def is_module(self) -> bool:
        """Whether a whole module is called."""
        return isinstance(self.target, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tensor that appeared: where from, and what it is.

    Attributes:
        key: its name in the batch, if it comes from there.
        segment: that of the node that made it; -1 for the batch's.
        sizes: a number or an expression for each dimension.
    """

    key: str | None
    segment: int
    sizes: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool


class ForwardRecorder(TorchFunctionMode):
    """Sees every operation while the block lasts; those inside a whole module are not written down.

    Args:
        batch: the forward's arguments.
        weights: parameters and buffers by name.
        device: that all of them seem to be on.

    Attributes:
        nodes: so far.
        segment: of the nodes to come.
    """

    def __init__(self, batch: Mapping[str, Any], weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.segment = 0
        self._depth = 0
        self._weights = {id(weight): name for name, weight in weights.items()}
        self._device_type = device.type
        self._autocast = torch.is_autocast_enabled(device.type)
        self._numbers: dict[int, int] = {}
        self._tensors: list[tuple[torch.Tensor, int, str | None, Any]] = []  # kept, so that no id is used twice
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                self._number(value, segment=-1, key=name)

    @property
    def inside(self) -> bool:
        """Whether a whole module is running."""
        return self._depth > 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and write it down."""
        kwargs = kwargs or {}
        output = _attention(*args, **kwargs) if func is F.scaled_dot_product_attention else func(*args, **kwargs)
        mutates = getattr(func, "__name__", "") in ("__setitem__", "__set__")
        if not self.inside and (mutates or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))):
            self._add(func, args, kwargs, args[0] if mutates else output, mutates=mutates)
        return output

    def call_module(self, name: str, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a whole module and write down the call."""
        segment, given = self.segment, (self.encode(args), self.encode(kwargs))
        self._depth += 1
        try:
            output = run()
        finally:
            self._depth -= 1
        self._add(name, *given, output, segment=segment)
        return output

    def results(self) -> list[Result]:
        """All tensors that were numbered."""
        return [
            Result(
                key=key,
                segment=segment,
                sizes=tuple(expression_of(size) for size in tensor.shape),
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad and tensor.is_floating_point(),
            )
            for tensor, segment, key, _ in self._tensors
        ]

    def encode(self, value: Any) -> Any:
        """A value as it is written down; raises ConfigError for what cannot be followed."""
        match value:
            case torch.Tensor():
                return self._encode_tensor(value)
            case torch.SymInt() | torch.SymFloat():
                expression = expression_of(value)
                return Size(expression) if isinstance(expression, sympy.Basic) else expression
            case torch.SymBool():
                return bool(value)
            case torch.device():
                return Device.STAGE if value.type == self._device_type else value
            case torch.Size():
                return tuple(map(self.encode, value))
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self.encode, value))
            case tuple() | list():
                return type(value)(map(self.encode, value))
            case slice():
                return slice(*map(self.encode, (value.start, value.stop, value.step)))
            case dict() if type(value) is dict:
                return {key: self.encode(each) for key, each in value.items()}
            case _:
                return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        """Values of other types are constants, or hold tensors in a way that can be taken apart and put together."""
        leaves = tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:
            return tree_map_only((torch.Tensor, torch.SymInt, torch.SymFloat, torch.device), self.encode, value)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(getattr(value, "__dict__", None))):
            raise ConfigError(
                f"a {type(value).__name__} that holds tensors is passed between modules, which only tensors, numbers "
                "and tuples, lists and dictionaries of them can be",
                hint="return tensors from one module and give them to the next",
            )
        return value

    def _encode_tensor(self, tensor: torch.Tensor) -> Any:
        if (name := self._weights.get(id(tensor))) is not None:
            return Weight(name)
        if (number := self._numbers.get(id(tensor))) is not None:
            made = self._tensors[number][3]
            if (function := tensor.grad_fn) is not made and _is_of_user(function):
                raise ConfigError(
                    f"the autograd function {type(function).__name__} is applied between modules, where its "
                    "backward cannot be followed",
                    hint="call it inside a module of its own",
                )
            return Value(number)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            return tensor  # a constant of the user's code
        raise ConfigError(
            "a tensor made inside one module is used outside of it without having been returned",
            hint="return it from the module's forward",
        )

    def _add(
        self,
        target: Callable[..., Any] | str,
        args: Any,
        kwargs: Any,
        output: Any,
        *,
        segment: int | None = None,
        mutates: bool = False,
    ) -> None:
        if torch.is_autocast_enabled(self._device_type) != self._autocast:
            raise ConfigError("autocast is switched between modules", hint="switch it inside a module")
        segment = self.segment if segment is None else segment
        if not isinstance(target, str):
            args, kwargs = self.encode(args), self.encode(kwargs)
        paths, _ = tree_flatten_with_path(output)
        outputs = [
            (self._number(leaf, segment=segment), path) for path, leaf in paths if isinstance(leaf, torch.Tensor)
        ]
        self.nodes.append(
            Node(
                segment=segment,
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=tuple(outputs),
                mutates=mutates,
                with_grad=torch.is_grad_enabled(),
            )
        )

    def _number(self, tensor: torch.Tensor, *, segment: int, key: str | None = None) -> int:
        self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append((tensor, segment, key, tensor.grad_fn))
        return len(self._tensors) - 1


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The shape of attention's output: choosing its kernel would ask for sizes as numbers."""
    whole = query[..., :1] + key.sum() + value.sum()
    return whole.expand(*query.shape[:-1], value.shape[-1]).contiguous()


def _is_of_user(function: object) -> bool:
    """Whether a gradient function is that of a `torch.autograd.Function`."""
    return isinstance(function, BackwardCFunction)


def values_in(tree: Any) -> Sequence[Any]:
    """Every `Value`, `Weight`, `Size` and constant inside what was encoded."""
    match tree:
        case tuple() | list():
            return [leaf for each in tree for leaf in values_in(each)]
        case dict():
            return [leaf for each in tree.values() for leaf in values_in(each)]
        case slice():
            return [leaf for each in (tree.start, tree.stop, tree.step) for leaf in values_in(each)]
    leaves = tree_leaves(tree)
    return [tree] if len(leaves) == 1 and leaves[0] is tree else [leaf for each in leaves for leaf in values_in(each)]
