"""How Megatron writes layers and their stages.

    --hybrid-layer-pattern *-*E|*--              attention  MLP  attention  experts │ attention  MLP  MLP  head
    --pipeline-model-parallel-layout Ett|tL      embedding  layer  layer │ layer  head

In the pattern of a HybridModel a layer is one module, and a split counts modules.
"""

import ast
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from megatron_dynapipe.core.costs import ABSENT, ATTENTION, EXPERT_MLP, MLP, CostTables, IntArray, Kind, Quantity
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import LayerSplit, PipelineLayout

FLAG = "--hybrid-layer-pattern"
ATTENDS, LATENT, DENSE, EXPERTS, STAGE_END = "*+-E|"
"""Symbols of attention, of latent attention, of an MLP, of experts, and the end of a stage."""
_MOST_LAYERS = 10_000
_NOT_TRAINED = {
    "M": "Mamba layers, whose costs are not known",
    "G": "gated delta nets, whose costs are not known",
    "D": "sparse attention, whose costs are not known",
    "/": "layers that predict several tokens, whose loss is averaged over micro-batches",
}


def kinds_of_pattern(pattern: str) -> tuple[Kind, ...]:
    """The modules of a pattern; its experts are of the kind of MLPs where it has no other MLPs.

    Raises:
        ConfigError: it has no module, or a symbol that planned runs have no module of; names the position, from 1.
    """
    symbols = {ATTENDS: ATTENTION, LATENT: ATTENTION, DENSE: MLP, EXPERTS: EXPERT_MLP if DENSE in pattern else MLP}
    for position, symbol in enumerate(pattern, 1):
        if symbol not in (*symbols, STAGE_END):
            what = _NOT_TRAINED.get(symbol)
            raise ConfigError(
                f"{FLAG} {pattern}: {symbol!r} at position {position} "
                + (f"stands for {what}" if what else "is no symbol of a layer"),
                hint="planned runs train * and + (attention), - (MLP) and E (experts); | ends a stage",
            )
    if not (modules := without_stages(pattern)):
        raise ConfigError(f"{FLAG} {pattern!r}: expected a layer, got none", hint="for example *-*-")
    return tuple(symbols[symbol] for symbol in modules)


def expert_modules(pattern: str) -> tuple[int, ...]:
    """The modules with experts of a pattern that has other MLPs too; empty for others, as `Experts.layers`."""
    if DENSE not in pattern:
        return ()
    return tuple(module for module, symbol in enumerate(without_stages(pattern)) if symbol == EXPERTS)


def without_stages(pattern: str) -> str:
    """The pattern of the same modules that says nothing of stages."""
    return pattern.replace(STAGE_END, "")


def layer_split_of_pattern(pattern: str) -> LayerSplit | None:
    """Modules of each virtual stage; None where the pattern says nothing of stages."""
    return tuple(map(len, pattern.split(STAGE_END))) if STAGE_END in pattern else None


def with_stages(pattern: str, split: LayerSplit) -> str:
    """The pattern with the stages of a split of its modules."""
    modules, ends = without_stages(pattern), [int(end) for end in accumulate(split, initial=0)]
    return STAGE_END.join(modules[first:end] for first, end in pairwise(ends))


def check_stages(pattern: str, *, stages: int, split: LayerSplit | None = None) -> None:
    """Hold a pattern's stages against the pipeline, and against a split that another flag gives.

    Args:
        pattern: with stages.
        stages: the pipeline's; each has one segment of the pattern or as many as the others.
        split: modules of each virtual stage, if they are given, too.

    Raises:
        ConfigError: naming the position in the pattern, from 1.
    """
    ends = [match.start() + 1 for match in re.finditer(re.escape(STAGE_END), pattern)]
    if (len(ends) + 1) % stages:
        raise ConfigError(
            f"{FLAG} {pattern}: expected segments for {stages} pipeline stages, as many on each, got {len(ends) + 1},"
            f" the last from position {ends[-1] + 1}",
            hint="write | between stages, or leave it out and pass --dynapipe-layers-per-stage or let plans choose",
        )
    if (empty := pattern.find(2 * STAGE_END)) >= 0:
        raise ConfigError(
            f"{FLAG} {pattern}: expected a layer between | and | at position {empty + 1}, got none",
            hint="the first stage and the last may do without: the embedding and the head are there",
        )
    if split is None:
        return
    expected = [int(end) + number for number, end in enumerate(accumulate(split), 1)][:-1]
    odd = next((end for end in ends if end not in expected), None)
    if odd is not None or len(expected) > len(ends):
        got = f"| at position {odd}" if odd else f"no | at position {next(e for e in expected if e not in ends)}"
        asked = ",".join(map(str, split))
        raise ConfigError(
            f"{FLAG} {pattern}: expected the stages of --dynapipe-layers-per-stage {asked}, got {got}",
            hint="give the stages once: leave one of them out",
        )


def each_alone(tables: CostTables) -> CostTables:
    """Costs of modules that are a layer each, from the costs of modules that are one layer in pairs.

    Recomputed in full, every layer keeps its input; and an MLP may follow anything, so that it has its own peak.
    """

    def alone(values: IntArray) -> IntArray:
        values = values.copy()
        attention = values[tables.kinds.index(ATTENTION)]
        for kind in (MLP, EXPERT_MLP):
            if kind not in tables.kinds:
                continue
            mlp = values[tables.kinds.index(kind)]
            absent = (mlp == ABSENT).any(axis=0) | (attention[Quantity.STORED] == ABSENT)
            peak = mlp[Quantity.ENTRY_PEAK] - attention[Quantity.STORED]
            mlp[Quantity.PEAK] = np.maximum(mlp[Quantity.PEAK], peak)
            mlp[Quantity.STORED] += mlp[Quantity.ENTRY_STORED]
            mlp[Quantity.ENTRY_STORED] = 0
            mlp[:, absent] = ABSENT
        return values

    packed = tables.packed
    if packed is not None:
        packed = replace(packed, linear=alone(packed.linear), attention=alone(packed.attention))
    return replace(
        tables,
        values=alone(tables.values),
        separate=None if tables.separate is None else alone(tables.separate),
        packed=packed,
    )


def pattern_of(layout: PipelineLayout, *, experts: bool = False) -> str:
    """The pattern of a decoder-only model over a pipeline; `experts`: every MLP has them."""
    symbols = {ATTENTION: ATTENDS, MLP: EXPERTS if experts else DENSE, EXPERT_MLP: EXPERTS}
    modules = "".join(symbols[kind] for kind in layout.modules[:-1])
    return with_stages(modules, layout.modules_per_stage)


def megatron_layout(split: LayerSplit) -> str:
    """Layers per virtual stage in the letters of `--pipeline-model-parallel-layout`: (2, 1) is "Ett|tL".

    A stage that ends within a layer has a comma, which is cosmetic to Megatron: (2.5, 1.5) is "Ett,|ttL". The layer
    stands where its MLP is. So Megatron gives every layer its number in the whole model: a stage counts on from those
    before it, and the attention that it ends with comes after its own.
    """
    ends = list(accumulate(split, initial=0))
    stages = ("t" * (int(end) - int(start)) + "," * bool(end % 1) for start, end in pairwise(ends))
    return f"E{STAGE_END.join(stages)}L"


def evaluated(text: str) -> Any:
    """The value of lists of numbers, added and multiplied, as Megatron's flags of layers are; None of other text."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int(number)) if 0 <= number <= _MOST_LAYERS:
                return number
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=ast.List() | ast.BinOp() as left, op=ast.Mult(), right=ast.Constant() as right):
                return (value(left) * value(right))[:_MOST_LAYERS]
        raise TypeError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return None
