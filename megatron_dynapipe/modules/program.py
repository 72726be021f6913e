"""A trace, divided: what each stage runs, and which values cross each boundary.

    stage 0                     │ stage 1                        │ stage 2
    v3 = embed(batch["ids"])    │ v3, v8 received                │ v3, v9 received
    v8 = h.0(v3, mask)          │ v9 = h.1(v8, mask)             │ v12 = h.2(v9, v3)
    sends v3, v8                │ sends v3, v9                   │ returns v12

A value that skips stages (v3) travels through those in between. What follows from the batch alone (masks, positions)
is made again wherever it is used, so that it crosses no boundary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey, tree_flatten, tree_unflatten

from megatron_dynapipe.modules.record import Device, Node, Result, Size, Value, Weight, values_in
from megatron_dynapipe.modules.symbols import Evaluate
from megatron_dynapipe.modules.trace import TracedForward

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One tensor at a boundary.

    Attributes:
        value: its number in the trace.
        differentiable: whether its gradient crosses back.
    """

    value: int
    differentiable: bool
    dtype: torch.dtype


class Division:
    """A trace over stages.

    Args:
        trace: of the model.
        stage_of: the stage of each segment, never falling.

    Attributes:
        boundaries: what crosses from stage v to stage v + 1, per v.
    """

    def __init__(self, trace: TracedForward, stage_of: Sequence[int]) -> None:
        assert len(stage_of) == len(trace.points) + 1, "a stage for every segment"
        self.trace = trace
        self.stages = stage_of[-1] + 1
        self._stage_of = stage_of
        self._maker = {number: node for node in trace.nodes for number, _ in node.outputs}
        self._repeatable = _repeatable(trace)
        self._programs = [self._nodes_of(stage) for stage in range(self.stages)]
        self.boundaries = [self._crossing(stage) for stage in range(self.stages - 1)]

    def modules(self, stage: int) -> list[str]:
        """Names of the whole modules that a stage calls."""
        return list(dict.fromkeys(node.name for node in self._programs[stage] if node.is_module))

    def weights(self, stage: int) -> list[str]:
        """Names of the parameters and buffers that a stage uses outside of whole modules."""
        used = [leaf.name for leaf in self._leaves(stage) if isinstance(leaf, Weight)]
        return list(dict.fromkeys(used))

    def batch_keys(self, stage: int) -> list[str]:
        """Names of the batch's tensors that a stage uses."""
        numbers = {leaf.index for leaf in self._leaves(stage) if isinstance(leaf, Value)}
        return [value.key for n, value in enumerate(self.trace.values) if n in numbers and value.key is not None]

    def compile(self, stage: int, resolve: Callable[[str], Any]) -> "StageFunction":
        """What a stage runs.

        Args:
            stage: its number.
            resolve: the module of a name; of a weight's name, the module that holds it.
        """
        last = stage == self.stages - 1
        received = [crossing.value for crossing in self.boundaries[stage - 1]] if stage else []
        returned = self.trace.output if last else tuple(Value(c.value) for c in self.boundaries[stage])
        return StageFunction(*compile_stage(self.trace, self._programs[stage], received, returned, resolve))

    def sizes_at(self, stage: int) -> Evaluate:
        """The shapes of what crosses from a stage to the next, all dimensions one after another."""
        sizes = [size for c in self.boundaries[stage] for size in self.trace.values[c.value].sizes]
        return self.trace.domain.evaluator(sizes)

    @cached_property
    def description(self) -> str:
        """What the division is, for comparing that of ranks: equal where they run the same model."""
        nodes = [
            f"{self._stage_of[node.segment]} {node.name} {[number for number, _ in node.outputs]}"
            for node in self.trace.nodes
        ]
        return "\n".join([*nodes, *(f"{value.sizes} {value.dtype}" for value in self.trace.values)])

    def _stage(self, node: Node) -> int:
        return self._stage_of[node.segment]

    def _nodes_of(self, stage: int) -> list[Node]:
        """The stage's nodes, and those made again for it, in the order of the forward."""
        mine = self._live()
        wanted = {id(node) for node in mine if self._stage(node) == stage and id(node) not in self._repeatable}
        pending = [leaf for node in mine if id(node) in wanted for leaf in values_in((node.args, node.kwargs))]
        if stage == self.stages - 1:
            pending += values_in(self.trace.output)
        while pending:
            leaf = pending.pop()
            node = self._maker.get(leaf.index) if isinstance(leaf, Value) else None
            if node is not None and id(node) in self._repeatable and id(node) not in wanted:
                wanted.add(id(node))
                pending += values_in((node.args, node.kwargs))
        return [node for node in self.trace.nodes if id(node) in wanted]

    def _live(self) -> list[Node]:
        """Nodes that have an effect: calls of modules, changes in place, and whatever those or the output need."""
        used = {leaf.index for leaf in values_in(self.trace.output) if isinstance(leaf, Value)}
        live: list[Node] = []
        for node in reversed(self.trace.nodes):
            if node.is_module or node.in_place or any(number in used for number, _ in node.outputs):
                live.append(node)
                used |= {leaf.index for leaf in values_in((node.args, node.kwargs)) if isinstance(leaf, Value)}
        return live[::-1]

    def _leaves(self, stage: int) -> list[Any]:
        found = [leaf for node in self._programs[stage] for leaf in values_in((node.args, node.kwargs))]
        return found + (list(values_in(self.trace.output)) if stage == self.stages - 1 else [])

    def _crossing(self, boundary: int) -> list[Crossing]:
        """Values made up to a stage and used after it."""
        after = {
            leaf.index
            for stage in range(boundary + 1, self.stages)
            for leaf in self._leaves(stage)
            if isinstance(leaf, Value)
        }
        numbers = [n for n in sorted(after) if self._made_at(n) <= boundary]
        values: Sequence[Result] = self.trace.values
        return [Crossing(value=n, differentiable=values[n].requires_grad, dtype=values[n].dtype) for n in numbers]

    def _made_at(self, number: int) -> int:
        """The stage that makes a value; none for the batch's and what is made again."""
        node = self._maker.get(number)
        return self.stages if node is None or id(node) in self._repeatable else self._stage(node)


@dataclass(frozen=True, slots=True, eq=False)
class StageFunction:
    """A stage as a Python function.

    Attributes:
        run: takes what was received, the batch, the values of `sizes`, and the device; returns what is sent, or on
            the last stage what the model returns.
        sizes: the expressions that it is to be given.
        source: its code, for people.
    """

    run: Callable[[Sequence[torch.Tensor], Mapping[str, Any], Sequence[Any], torch.device], Any]
    sizes: Sequence[Any]
    source: str


def _repeatable(trace: TracedForward) -> set[int]:
    """Nodes (by id) that follow from the batch alone: operations without weights, random numbers or side effects."""
    changed = {
        leaf.index
        for node in trace.nodes
        if not node.is_module and node.in_place
        for leaf in values_in(node.args[:1])
        if isinstance(leaf, Value)
    }
    from_batch = {number for number, value in enumerate(trace.values) if value.key is not None}
    found: set[int] = set()
    for node in trace.nodes:
        if node.is_module or any(word in node.name for word in _RANDOM):
            continue
        leaves = values_in((node.args, node.kwargs))
        inputs = {leaf.index for leaf in leaves if isinstance(leaf, Value)}
        numbers = {number for number, _ in node.outputs}
        if any(isinstance(leaf, Weight) for leaf in leaves) or not inputs <= from_batch or (inputs | numbers) & changed:
            continue
        found.add(id(node))
        from_batch |= numbers
    return found


def compile_stage(
    trace: TracedForward,
    nodes: Sequence[Node],
    received: Sequence[int],
    returned: Any,
    resolve: Callable[[str], Any],
) -> tuple[Callable[..., Any], Sequence[sympy.Expr], str]:
    """The function of a stage, the expressions of the sizes that it takes, and its source.

    def run(received, batch, sizes, device):
        v8, v3, = received
        z0, = sizes
        v9 = m0(v8, v3)
        v10 = f0(v9, (z0, -1))
        return (v10, v3,)
    """
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

    def __init__(self, trace: TracedForward, resolve: Callable[[str], Any]) -> None:
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
