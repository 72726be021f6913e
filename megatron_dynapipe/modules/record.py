"""Recording what happens between modules as a `torch.fx.Graph`: operations, calls of whole modules, sizes.

    batch, sizes, device        placeholders
    ids = batch["ids"]          a batch's tensors and the sizes of a micro-batch are read where they are needed
    n0 = embedding(ids)         a whole module
    n1 = add(n0, weight)        an operation between modules

A node's `args` are the leaves of what was given, flat; `meta` has the tree that they are put into (`spec`), the
`segment`, whether gradients were enabled (`grad`) and, for a tensor, its `tensor` (a `TensorMeta`).

A batch's dimensions are symbols. This is the machinery that `torch.export` stands on, used directly: what is traced
here is the code between modules alone, and where a batch's sizes lie outside what a trace holds for, the model is
traced again instead of refused.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from megatron_dynapipe.core.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""Sizes of a batch's tensors, by name."""
Evaluate = Callable[[tuple[int, ...]], tuple[Any, ...]]
"""Values of expressions, given the symbols' values."""

_KEPT_SIZES = 4096
"""Sets of sizes whose values are kept: micro-batches of a run come again."""
_LEAST = 2
"""Sizes of 0 and 1 are not symbols: they broadcast, so a trace holds for them alone."""


class SymbolicBatch:
    """A batch as tensors without memory whose sizes are symbols; equal sizes are one symbol."""

    def __init__(self, batch: Mapping[str, Any], device: torch.device) -> None:
        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self.values: dict[str, Any] = {}
        self._sizes: dict[str, tuple[sympy.Expr | int, ...]] = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                like = torch.empty(value.shape, dtype=value.dtype, device=device)
                value = self.mode.from_tensor(like, source=ConstantSource(name))
                self._sizes[name] = tuple(expression_of(size) for size in value.shape)
            self.values[name] = value

    def domain(self) -> "Domain":
        """The sizes for which what was traced holds; asked once the trace is done."""
        conditions = [guard.expr for guard in self._env.guards]
        conditions += [sympy.Eq(symbol, value) for symbol, value in self._env.replacements.items()]
        return Domain(self._sizes, conditions)


class Domain:
    """Batches for which a trace holds."""

    def __init__(self, sizes: Mapping[str, tuple[sympy.Expr | int, ...]], conditions: Sequence[sympy.Basic]) -> None:
        self._sizes = sizes
        symbols = [size for shape in sizes.values() for size in shape if isinstance(size, sympy.Symbol)]
        self._symbols = list(dict.fromkeys(symbols))
        self._holds = self.evaluator(conditions)

    def bind(self, shapes: Shapes) -> tuple[int, ...] | None:
        """Values of the symbols for a batch of these shapes; None where the trace does not hold for it."""
        if shapes.keys() != self._sizes.keys():
            return None
        bound: dict[sympy.Symbol, int] = {}
        for name, sizes in self._sizes.items():
            if len(shapes[name]) != len(sizes):
                return None
            for size, value in zip(sizes, shapes[name], strict=True):
                if not isinstance(size, sympy.Symbol):
                    if value != size:
                        return None
                elif value < _LEAST or bound.setdefault(size, value) != value:
                    return None
        values = tuple(bound[symbol] for symbol in self._symbols)
        return values if all(self._holds(values)) else None

    def evaluator(self, expressions: Sequence[object]) -> Evaluate:
        """The function from the symbols' values to the values of expressions over them, and of plain numbers."""
        symbols = self._symbols

        @functools.lru_cache(_KEPT_SIZES)
        def values_of(values: tuple[int, ...]) -> tuple[Any, ...]:
            known = dict(zip(symbols, values, strict=True))
            return tuple(_value(expression, known) for expression in expressions)

        return values_of


def _value(expression: object, known: Mapping[sympy.Symbol, int]) -> object:
    """The number, or the truth, of an expression; of a plain number itself."""
    if isinstance(expression, sympy.Basic):
        expression = sympy_interp(PythonReferenceAnalysis, dict(known), expression)
    if isinstance(expression, sympy.Number):
        return int(expression) if expression.is_Integer else float(expression)
    return expression


def expression_of(size: Any) -> Any:
    """The expression behind a symbolic number; a plain number as it is."""
    if isinstance(size, torch.SymInt | torch.SymFloat):
        expression = size.node.expr
        if isinstance(expression, sympy.Integer):
            return int(expression)
        return float(expression) if isinstance(expression, sympy.Float) else expression
    return size


CHANGES = ("__setitem__", "__set__")
"""Operations that return nothing: what they change stands for it."""
_IN_PLACE = {
    *("__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
    *CHANGES,
}
_KEPT = ("placeholder", "call_module", "output")


class TensorMeta(NamedTuple):
    """A tensor that may cross a boundary.

    Attributes:
        shape: a number for each dimension; in a trace, an expression of its symbols where it depends on them.
        dtype: name of its type in torch.
        differentiable: whether its gradient crosses back.
    """

    shape: tuple[Any, ...]
    dtype: str
    differentiable: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorMeta":
        """Describe a tensor."""
        shape = tuple(map(expression_of, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(shape, dtype, tensor.requires_grad and tensor.is_floating_point())


def name_of(node: fx.Node) -> str:
    """Name of the module or the function that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def is_module(node: fx.Node) -> bool:
    """Whether a node calls a whole module."""
    return node.op == "call_module"


def is_in_place(node: fx.Node) -> bool:
    """Whether an operation changes what it is given first."""
    name = name_of(node)
    return node.op == "call_function" and (name in _IN_PLACE if name.startswith("__") else name.endswith("_"))


class ForwardRecorder(TorchFunctionMode):
    """Sees every operation while the block lasts; those inside a whole module are not recorded.

    Attributes:
        segment: the segment of the nodes to come.
        sizes: numbers that depend on the batch's sizes, and their places among the sizes that stages are given.
    """

    def __init__(self, batch: Mapping[str, Any], weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.segment = 0
        self.sizes: dict[sympy.Expr, int] = {}
        self._depth = 0
        self._weights = {id(weight): name for name, weight in weights.items()}
        self._storages = {_storage(weight): name for name, weight in weights.items()}
        self._device_type = device.type
        self._autocast = torch.is_autocast_enabled(device.type)
        self._leaves: dict[Any, fx.Node] = {}
        self._nodes: dict[int, tuple[fx.Node, Any]] = {}
        self._tensors: list[tuple[torch.Tensor, fx.Node]] = []  # kept, so that no id is used twice
        self._batch, self._sizes, self._device = map(self.graph.placeholder, ("batch", "sizes", "device"))
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                self._note(value, self._create(operator.getitem, (self._batch, key), name=key))

    @property
    def inside(self) -> bool:
        """Whether a whole module is running."""
        return self._depth > 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        watched = self._watched(args, kwargs)
        output = _SHAPES_ALONE.get(func, func)(*args, **kwargs)
        self._check_unchanged(watched, _changed_by(func, args, kwargs))
        mutates = getattr(func, "__name__", "") in CHANGES
        if not self.inside and (mutates or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))):
            self._check_autocast()
            self._record(func, *self._encoded(args, kwargs), args[0] if mutates else output)
        return output

    def call_module(
        self, name: str, run: Callable[[], object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Run a whole module and record the call."""
        self._check_autocast()
        leaves, spec = self._encoded(args, kwargs)
        watched = self._watched(args, kwargs)
        self._depth += 1
        try:
            output = run()
        finally:
            self._depth -= 1
        self._check_unchanged(watched)
        self._record(name, leaves, spec, output)
        return output

    def _watched(self, *arguments: object) -> list[tuple[torch.Tensor, int, str]]:
        """Weights among arguments, and views of them, with their versions and names."""
        leaves = [] if self.inside else [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        return [(t, t._version, name) for t in leaves if (name := self._storages.get(_storage(t))) is not None]

    def _check_unchanged(self, watched: Sequence[tuple[torch.Tensor, int, str]], changed: Sequence[Any] = ()) -> None:
        """Refuse a change in place: every stage would change a copy of its own."""
        for tensor, version, name in watched:
            if tensor._version != version or any(tensor is other for other in changed):
                raise ConfigError(
                    f"{name} is changed in place between modules, where stages have copies of it",
                    hint="change it inside a module of its own, which no cut divides",
                )

    def finish(self, output: Any) -> fx.Graph:
        """The graph, with what the model returned, without what nothing needs."""
        leaves, spec = self._encoded(output)
        self.graph.output(tuple(leaves)).meta.update(spec=spec, segment=self.segment)
        for tensor, node in self._tensors:
            node.meta["tensor"] = TensorMeta.of(tensor)
        self.graph.eliminate_dead_code(lambda node: node.op in _KEPT or is_in_place(node))
        return self.graph

    def _check_autocast(self) -> None:
        if torch.is_autocast_enabled(self._device_type) != self._autocast:
            raise ConfigError("autocast is switched between modules", hint="switch it inside a module")

    def _record(self, target: Callable[..., Any] | str, leaves: list[Any], spec: Any, output: Any) -> None:
        node = self._create(target, tuple(leaves), spec=spec)
        paths, _ = tree_flatten_with_path(output)
        for path, leaf in paths:
            if isinstance(leaf, torch.Tensor):
                part = node
                for key in path:
                    part = self._create(*_access(part, key))
                self._note(leaf, part)

    def _create(
        self, target: Callable[..., Any] | str, args: tuple[Any, ...], *, spec: Any = None, name: str | None = None
    ) -> fx.Node:
        op = "call_module" if isinstance(target, str) else "call_function"
        called = target if isinstance(target, str) else getattr(target, "__name__", "operation")
        node = self.graph.create_node(op, target, args, name=name or called.strip("_").replace(".", "_"))
        node.meta.update(spec=spec, segment=self.segment, grad=torch.is_grad_enabled())
        return node

    def _note(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node, tensor.grad_fn
        self._tensors.append((tensor, node))

    def _encoded(self, *values: object) -> tuple[list[Any], Any]:
        """The leaves of values, tensors as nodes, and the tree; raises ConfigError for what cannot be followed."""
        leaves, spec = tree_flatten(values)
        return [self._encode(leaf) for leaf in leaves], spec

    def _encode(self, value: object) -> object:
        match value:
            case torch.Tensor():
                return self._encode_tensor(value)
            case torch.SymInt() | torch.SymFloat():
                return self._encode_size(expression_of(value))
            case torch.SymBool():
                return bool(value)
            case torch.device():
                return self._device if value.type == self._device_type else value
            case torch.Size():
                return tuple(map(self._encode, value))
            case slice():
                return slice(*map(self._encode, (value.start, value.stop, value.step)))
        inside = tree_leaves(value.__dict__) if hasattr(value, "__dict__") else ()
        if isinstance(value, tuple | list | dict) or any(isinstance(leaf, torch.Tensor) for leaf in inside):
            raise ConfigError(
                f"a {type(value).__name__} that holds tensors is passed between modules, which only tensors, numbers "
                "and tuples, lists and dictionaries of them can be",
                hint="return tensors from one module and give them to the next",
            )
        return value

    def _encode_size(self, size: Any) -> Any:
        if not isinstance(size, sympy.Basic):
            return size
        place = self.sizes.setdefault(size, len(self.sizes))
        return self._leaf(size, lambda: self._create(operator.getitem, (self._sizes, place), name=f"size_{place}"))

    def _encode_tensor(self, tensor: torch.Tensor) -> fx.Node:
        if (name := self._weights.get(id(tensor))) is not None:
            return self._leaf(name, lambda: self.graph.create_node("get_attr", name))
        if (known := self._nodes.get(id(tensor))) is not None:
            node, made_by = known
            if (function := tensor.grad_fn) is not made_by and isinstance(function, BackwardCFunction):
                raise ConfigError(
                    f"the autograd function {type(function).__name__} is applied between modules, where its "
                    "backward cannot be followed",
                    hint="call it inside a module of its own",
                )
            return node
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # a constant of the user's code
            return self._create(torch.Tensor.to, (tensor, self._device), name="constant")
        raise ConfigError(
            "a tensor made inside one module is used outside of it without having been returned",
            hint="return it from the module's forward",
        )

    def _leaf(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self._leaves:
            self._leaves[key] = make()
        return self._leaves[key]


def _changed_by(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an operation changes without a new version of them: tensors without memory have none then."""
    name = getattr(function, "__name__", "")
    if function in (F.batch_norm, F.instance_norm):
        return list(args[1:3]) if kwargs.get("training") or kwargs.get("use_input_stats") else []
    in_place = name in CHANGES or (name.endswith("_") and not name.endswith("__"))
    return tree_leaves(args[:1]) if in_place else []


def _storage(tensor: torch.Tensor) -> int:
    """A number that views of one memory have in common; only of tensors that live."""
    return int(tensor.untyped_storage()._cdata)


def _access(node: fx.Node, key: object) -> tuple[Callable[..., object], tuple[object, ...]]:
    """How to reach a part of what a node returned."""
    match key:
        case SequenceKey():
            return operator.getitem, (node, key.idx)
        case MappingKey():
            return operator.getitem, (node, key.key)
        case GetAttrKey():
            return getattr, (node, key.name)
    raise TypeError(f"no way into a structure with the key {key!r}")


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    whole = query[..., :1] + key.sum() + value.sum()
    return whole.expand(*query.shape[:-1], value.shape[-1]).contiguous()


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return rows @ weight[0]


_SHAPES_ALONE: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.grouped_mm: _grouped_mm,
    torch._grouped_mm: _grouped_mm,
}
"""Operations whose output's shape is all that is wanted: choosing their kernels asks for sizes as numbers."""
