"""A trace, divided: what each stage runs, and which values cross each boundary.

    stage 0                      │ stage 1                       │ stage 2
    embed = embed(batch["ids"])  │ embed, h_0 received           │ embed, h_1 received
    h_0 = h.0(embed, mask)       │ h_1 = h.1(h_0, mask)          │ h_2 = h.2(h_1, embed)
    sends embed, h_0             │ sends embed, h_1              │ returns h_2

A value that skips stages (embed) travels through those in between. What follows from the batch alone (masks, positions)
is made again wherever it is used, so that it crosses no boundary.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_dynapipe.modules.record import CHANGES, TensorMeta, is_in_place, is_module, name_of
from megatron_dynapipe.modules.trace import TracedForward

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson")


class SplitTrace:
    """A trace over stages."""

    def __init__(self, trace: TracedForward, stage_of: Sequence[int]) -> None:
        assert len(stage_of) == len(trace.points) + 1, "a stage for every segment"
        self.trace = trace
        self.stages = stage_of[-1] + 1
        self.stage_of = list(stage_of)
        self._inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
        self._anywhere = _anywhere(trace.graph)
        self._programs = [self._nodes_of(stage) for stage in range(self.stages)]
        self._crossing = [self._crossing_after(stage) for stage in range(self.stages - 1)]
        self.boundaries: list[list[TensorMeta]] = [[node.meta["tensor"] for node in nodes] for nodes in self._crossing]

    def modules(self, stage: int) -> list[str]:
        """Names of the whole modules that a stage calls."""
        return list(dict.fromkeys(name_of(node) for node in self._programs[stage] if is_module(node)))

    def weights(self, stage: int) -> list[str]:
        """Names of the parameters and buffers that a stage uses outside of whole modules."""
        return [name_of(node) for node in self._programs[stage] if node.op == "get_attr"]

    def batch_keys(self, stage: int) -> list[str]:
        """Names of the batch's tensors that a stage uses."""
        batch = self._inputs[0]
        return [str(node.args[1]) for node in self._programs[stage] if node.args and node.args[0] is batch]

    def compile(self, stage: int, resolve: Callable[[str], Any]) -> "StageFunction":
        """The function of a stage."""
        received = self._crossing[stage - 1] if stage else []
        sent = None if stage == self.stages - 1 else self._crossing[stage]
        return StageFunction(self._programs[stage], received, sent, self._inputs, resolve)

    def boundary_after(self, stage: int) -> Callable[[tuple[int, ...]], tuple[TensorMeta, ...]]:
        """The tensors that cross from a stage to the next, from values of the trace's symbols."""
        boundary = self.boundaries[stage]
        evaluate = self.trace.domain.evaluator([size for meta in boundary for size in meta.shape])

        def at(symbols: tuple[int, ...]) -> tuple[TensorMeta, ...]:
            sizes = iter(evaluate(symbols))
            return tuple(meta._replace(shape=tuple(next(sizes) for _ in meta.shape)) for meta in boundary)

        return at

    @cached_property
    def description(self) -> str:
        """A text that is equal on ranks that run the same model alike."""
        nodes = [
            f"{self.stage_of[node.meta['segment']]} {name_of(node)} {node.name} {node.meta.get('tensor')}"
            for node in self.trace.graph.nodes
            if "segment" in node.meta
        ]
        return "\n".join(nodes)

    def _nodes_of(self, stage: int) -> list[fx.Node]:
        """The stage's nodes, and those made again for it, in the order of the forward."""
        nodes = [node for node in self.trace.graph.nodes if node.op != "placeholder"]
        run = {n for n in nodes if n not in self._anywhere and self.stage_of[n.meta["segment"]] == stage}
        pending = [read for node in run for read in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in self._anywhere and node not in run:
                run.add(node)
                pending += node.all_input_nodes
        return [node for node in nodes if node in run]

    def _crossing_after(self, boundary: int) -> list[fx.Node]:
        """Values made up to a stage and used after it."""
        before = {node for program in self._programs[: boundary + 1] for node in program} - self._anywhere
        read = {value for program in self._programs[boundary + 1 :] for n in program for value in n.all_input_nodes}
        return [node for node in self.trace.graph.nodes if node in before & read]


class StageFunction:
    """A stage's nodes as a function; values are dropped after their last use.

    `sent` is None on the last stage, whose last node is what the model returns; `inputs` stand for the batch, the sizes
    and the device.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        received: Sequence[fx.Node],
        sent: Sequence[fx.Node] | None,
        inputs: Sequence[fx.Node],
        resolve: Callable[[str], Any],
    ) -> None:
        self._received = received
        self._sent = sent
        self._inputs = inputs
        last_user = {value: node for node in nodes for value in (node, *node.all_input_nodes)}
        kept = {*inputs, *(sent or nodes[-1:])}
        finished: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for value, user in last_user.items():
            if value not in kept:
                finished[user].append(value)
        self._steps = [(node, _call(node, resolve), finished[node]) for node in nodes]

    def run(
        self, received: Sequence[torch.Tensor], batch: Mapping[str, Any], sizes: Sequence[Any], device: torch.device
    ) -> object:
        """Run the stage on what it received, the batch and values of the trace's `sizes`; what it sends, or returns."""
        values: dict[fx.Node, Any] = dict(zip(self._received, received, strict=True))
        values |= zip(self._inputs, (batch, sizes, device), strict=True)
        for node, call, finished in self._steps:
            values[node] = call(values)
            for dropped in finished:
                del values[dropped]
        if self._sent is not None:
            return tuple(values[node] for node in self._sent)
        last, _, _ = self._steps[-1]
        return values[last]

    @property
    def source(self) -> str:
        """The nodes, for people."""
        lines = []
        if self._received:
            lines.append(f"{_listed(self._received)} = received")
        for node, _, _ in self._steps:
            lines.append(f"{node} = {name_of(node)}({_listed(node.args)})")
        if self._sent is not None:
            lines.append(f"return {_listed(self._sent)}")
        return "\n".join(lines)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _call(node: fx.Node, resolve: Callable[[str], Any]) -> Callable[[Mapping[fx.Node, Any]], Any]:
    """Gives a node's value from the values so far."""
    if node.op == "get_attr":
        holder, _, attribute = name_of(node).rpartition(".")
        module = resolve(holder)
        weights = module._parameters if attribute in module._parameters else module._buffers
        return lambda _: weights[attribute]
    spec = node.meta["spec"]
    arguments = node.args
    if node.op == "output":
        return lambda values: tree_unflatten(_taken(arguments[0], values), spec)[0]
    target: Any = resolve(name_of(node)) if is_module(node) else node.target
    is_flat = spec in (None, tree_flatten((arguments, {}))[1])
    is_simple = not any(isinstance(argument, slice | tuple) for argument in arguments)
    grad = node.meta["grad"]
    is_changed = name_of(node) in CHANGES

    def call(values: Mapping[fx.Node, Any]) -> Any:
        if is_simple:
            leaves = [values[argument] if isinstance(argument, fx.Node) else argument for argument in arguments]
        else:
            leaves = _taken(arguments, values)
        args = leaves
        kwargs: dict[str, Any] = {}
        if not is_flat:
            args, kwargs = tree_unflatten(leaves, spec)
        with nullcontext() if grad else torch.no_grad():
            result = target(*args, **kwargs)
        return args[0] if is_changed else result

    return call


def _taken(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Values of the nodes inside slices and tuples, too."""
    return map_arg(arguments, values.__getitem__)


def _anywhere(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that any stage can run: weights, and what follows from the batch alone, by operations without weights,
    random numbers or side effects.
    """
    changed = {value for node in graph.nodes if is_in_place(node) for value in node.args[:1]}
    of_batch: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        is_random = any(word in name_of(node) for word in _RANDOM)
        is_changed = changed & {node, *node.all_input_nodes}
        if node.op != "call_function" or is_random or is_changed:
            continue
        if of_batch.issuperset(node.all_input_nodes):
            of_batch.add(node)
    return of_batch | {node for node in graph.nodes if node.op == "get_attr"}
