"""A stage's nodes as the source of a Python function, and the function.

def run(received, batch, sizes, device):
    v8, v3, = received
    z0, = sizes
    v9 = m0(v8, v3)
    v10 = f0(v9, (z0, -1))
    return (v10, v3,)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten, tree_unflatten

from megatron_dynapipe.modules.record import Device, Node, Size, Value, Weight
from megatron_dynapipe.modules.trace import Trace


def compile_stage(
    trace: Trace,
    nodes: Sequence[Node],
    received: Sequence[int],
    returned: Any,
    resolve: Callable[[str], Any],
) -> tuple[Callable[..., Any], Sequence[sympy.Expr], str]:
    """The function of a stage, the expressions of the sizes that it takes, and its source."""
    emitter = _Emitter(trace, resolve)
    for node in nodes:
        emitter.add(node)
    result = emitter.literal(returned)
    head = [f"    {''.join(f'v{number}, ' for number in received)}= received"] if received else []
    sizes = emitter.sizes
    head += [f"    {''.join(f'z{k}, ' for k in range(len(sizes)))}= sizes"] if sizes else []
    lines = ["def run(received, batch, sizes, device):", *head, *emitter.lines, f"    return {result}"]
    source = "\n".join(lines)
    exec(compile(source, "<pipeline stage>", "exec"), emitter.names)
    return emitter.names["run"], list(sizes), source


class _Emitter:
    """Lines of a function, and what its names stand for."""

    def __init__(self, trace: Trace, resolve: Callable[[str], Any]) -> None:
        self._trace = trace
        self._resolve = resolve
        self.names: dict[str, Any] = {"no_grad": torch.no_grad}
        self.sizes: dict[sympy.Expr, int] = {}
        self.lines: list[str] = []

    def add(self, node: Node) -> None:
        """One node's line, and one for each tensor inside a structure that it returns."""
        target = self._resolve(node.target) if isinstance(node.target, str) else node.target
        name = self._name("m" if node.is_module else "f", target)
        given = [self.literal(each) for each in node.args]
        given += [f"**{self.literal(node.kwargs)}"] if node.kwargs else []
        call = f"{name}({', '.join(given)})"
        indent = "    "
        if not node.with_grad:
            self.lines.append("    with no_grad():")
            indent = "        "
        if node.mutates:
            self.lines.append(f"{indent}{call}")
            self.lines += [f"    v{number} = {given[0]}" for number, _ in node.outputs]
        elif [path for _, path in node.outputs] == [()]:
            self.lines.append(f"{indent}v{node.outputs[0][0]} = {call}  # {node.name}")
        else:
            self.lines.append(f"{indent}t = {call}  # {node.name}")
            self.lines += [f"    v{number} = t{_access(path)}" for number, path in node.outputs]

    def literal(self, value: Any) -> str:
        """Source of a value that was written down."""
        match value:
            case Value():
                key = self._trace.values[value.index].key
                return f"v{value.index}" if key is None else f"batch[{key!r}]"
            case Weight():
                holder, _, attribute = value.name.rpartition(".")
                return f"{self._name('m', self._resolve(holder))}.{attribute}"
            case Size():
                return f"z{self.sizes.setdefault(value.expression, len(self.sizes))}"
            case Device.STAGE:
                return "device"
            case None | bool() | int() | str():
                return repr(value)
            case float() if math.isfinite(value):
                return repr(value)
            case torch.Tensor():
                return f"{self._name('c', value)}.to(device)"
            case tuple() if not hasattr(value, "_fields"):
                return f"({''.join(f'{self.literal(each)}, ' for each in value)})"
            case list():
                return f"[{', '.join(map(self.literal, value))}]"
            case slice():
                return f"slice({', '.join(map(self.literal, (value.start, value.stop, value.step)))})"
            case dict() if type(value) is dict:
                return f"{{{', '.join(f'{key!r}: {self.literal(each)}' for key, each in value.items())}}}"
        return self._structure(value)

    def _structure(self, value: Any) -> str:
        """A constant, or a structure of another type, which is put together again each time."""
        leaves, spec = tree_flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return self._name("c", value)
        inside = "".join(f"{self.literal(leaf)}, " for leaf in leaves)
        return f"{self._name('c', lambda *given: tree_unflatten(list(given), spec))}({inside})"

    def _name(self, kind: str, value: Any) -> str:
        for name, known in self.names.items():
            if known is value and name.startswith(kind):
                return name
        name = f"{kind}{len(self.names)}"
        self.names[name] = value
        return name


def _access(path: Sequence[Any]) -> str:
    """How to reach a tensor inside what a module returned."""
    source = ""
    for key in path:
        match key:
            case SequenceKey():
                source += f"[{key.idx}]"
            case MappingKey():
                source += f"[{key.key!r}]"
            case GetAttrKey():
                source += f".{key.name}"
            case _:
                raise TypeError(f"no way into a structure with the key {key!r}")
    return source
