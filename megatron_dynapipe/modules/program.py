"""A trace, divided: what each stage runs, and which values cross each boundary.

    stage 0                     │ stage 1                        │ stage 2
    v3 = embed(batch["ids"])    │ v3, v8 received                │ v3, v9 received
    v8 = h.0(v3, mask)          │ v9 = h.1(v8, mask)             │ v12 = h.2(v9, v3)
    sends v3, v8                │ sends v3, v9                   │ returns v12

A value that skips stages (v3) travels through those in between. What follows from the batch alone (masks, positions)
is made again wherever it is used, so that it crosses no boundary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron_dynapipe.modules.emit import compile_stage
from megatron_dynapipe.modules.record import Node, Result, Value, Weight, values_in
from megatron_dynapipe.modules.symbols import Evaluate
from megatron_dynapipe.modules.trace import Trace

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

    def __init__(self, trace: Trace, stage_of: Sequence[int]) -> None:
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


def _repeatable(trace: Trace) -> set[int]:
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
