"""Sizes that are not known yet: a batch whose dimensions are symbols, and what a trace says of them later.

This is the machinery that `torch.export` stands on, used directly: what is traced here is the code between modules
alone, and where a batch's sizes lie outside what a trace holds for, the model is traced again instead of refused.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

Shapes = Mapping[str, tuple[int, ...]]
"""Sizes of a batch's tensors, by name."""
Evaluate = Callable[[Sequence[int]], tuple[Any, ...]]
"""Values of expressions, given those of the symbols."""

_LEAST = 2
"""Sizes of 0 and 1 are not symbols: they broadcast, so a trace holds for them alone."""


class SymbolicBatch:
    """A batch as tensors without memory whose sizes are symbols; equal sizes are one symbol.

    Args:
        batch: tensors by name; other values stay as they are.
        device: that the tensors seem to be on.

    Attributes:
        mode: the mode in which the tensors live.
        values: the batch.
    """

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
    """Batches for which a trace holds.

    Args:
        sizes: of every tensor: a symbol or a number for each dimension.
        conditions: on the symbols.
    """

    def __init__(self, sizes: Mapping[str, tuple[sympy.Expr | int, ...]], conditions: Sequence[sympy.Basic]) -> None:
        self._sizes = sizes
        symbols = [size for each in sizes.values() for size in each if isinstance(size, sympy.Symbol)]
        self._symbols = list(dict.fromkeys(symbols))
        self._holds = self.evaluator(conditions)

    def bind(self, shapes: Shapes) -> tuple[int, ...] | None:
        """Values of the symbols for a batch of these shapes; None where the trace does not hold for it."""
        if shapes.keys() != self._sizes.keys():
            return None
        found: dict[sympy.Symbol, int] = {}
        for name, sizes in self._sizes.items():
            if len(shapes[name]) != len(sizes):
                return None
            for size, value in zip(sizes, shapes[name], strict=True):
                if not isinstance(size, sympy.Symbol):
                    if value != size:
                        return None
                elif value < _LEAST or found.setdefault(size, value) != value:
                    return None
        values = tuple(found[symbol] for symbol in self._symbols)
        return values if all(self._holds(values)) else None

    def evaluator(self, expressions: Sequence[sympy.Basic]) -> Evaluate:
        """Compile expressions over the symbols."""
        printer = PythonPrinter()
        body = "".join(f"{printer.doprint(expression)}, " for expression in expressions)
        source = f"lambda {', '.join(map(str, self._symbols))}: ({body})"
        compiled = eval(source, {"math": math, "torch": torch})  # noqa: S307  (printed from sympy's expressions)
        return lambda values: compiled(*values)


def expression_of(size: Any) -> Any:
    """The expression behind a symbolic number; a plain number as it is."""
    if isinstance(size, torch.SymInt | torch.SymFloat):
        expression = size.node.expr
        if isinstance(expression, sympy.Integer):
            return int(expression)
        return float(expression) if isinstance(expression, sympy.Float) else expression
    return size
