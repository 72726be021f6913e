"""What a layout is, the samples that all layouts train on, and running a function of this package on its ranks."""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from megatron_dynapipe.core.units import ModelFamily
from tests.helpers.processes import run_ranks

HIDDEN, HEADS, VOCABULARY, MAX_LENGTH = 32, 4, 512, 64
INPUTS = (3, 40, 7, 55, 12, 1, 30, 5, 22, 9, 48, 2)
TARGETS = (2, 5, 9, 1, 14, 3, 6, 2, 11, 1, 4, 8)
ALL = tuple(range(len(INPUTS)))
"""The samples."""
MIXED = ("full", "selective", "none")
"""Modes of recomputation."""
EPSILON = 1e-3
"""Adam's, in layouts and in their reference.

Clipped gradients are around 3e-3, and rounding changes them by about 1e-9. With Adam's usual 1e-8, a weight whose
gradient happens to be that small moves by a tenth of the learning rate more or less, for rounding alone, and gradient
norms of later steps differ by 2e-4.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to train: the fields are those of the tables in the tests."""

    family: str = "gpt"
    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    idle: int = 0  # replicas that get no samples
    chunks: int = 1
    sequence: bool = False  # sequence parallelism
    positions: str = "learned_absolute"
    tied: bool = True  # embeddings and head
    attention: str = "sdpa"
    hidden: int = HIDDEN  # channels of all heads
    depth: int = 4  # layers in all; half of a T5's are the encoder's
    split: tuple[float, ...] | None = None  # layers per virtual stage
    pattern: str = ""  # of a HybridModel, whose modules are its layers
    recompute: tuple[str, ...] = ("none",)  # given to the micro-batches in turn
    modules: tuple[str, ...] = ("core_attn",)  # of selective recomputation
    dtype: str = "fp32"
    distributed_optimizer: bool = False
    overlap: bool = False
    gather: bool = False  # parameters in the forward pass, with the distributed optimizer
    bucket_size: int = 20_000  # parameters of a bucket, at least
    dropout: float = 0.0
    learning_rate: float = 1e-2
    loss_scale: float | None = None  # of fp16, to begin with
    samples: tuple[int, ...] = ALL
    layer_overhead_us: float = 5.0  # the less, the more micro-batches
    scatter_gather: str = "off"
    transfers: str = "gloo"  # or "cuda": the rules that plans are made under
    rows: str = "padded"  # packed, mixed: every second micro-batch, or as planned
    teams: tuple[tuple[int, ...], ...] = ()  # of replicas, by iteration
    then: tuple[int, ...] = ()  # teams of the second half of the samples, after those of the first half
    slices: int | None = None  # most positions of a piece; None leaves samples whole
    divided: int = 0  # backward passes: of every micro-batch, of every second one, …
    fused: bool = False  # weight gradients added up by the product
    engine: bool = False  # layers of Transformer Engine
    fused_loss: bool = False  # Megatron's cross entropy in one kernel
    targets: bool = False  # losses of targets alone, of which some samples have none

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.replicas

    @property
    def kind(self) -> ModelFamily:
        return ModelFamily(self.family)

    @property
    def layers(self) -> tuple[int, int]:
        """Encoder and decoder layers."""
        return (self.depth, 0) if self.kind is ModelFamily.GPT else (self.depth // 2, self.depth - self.depth // 2)

    @property
    def model(self) -> "Layout":
        """The same model and samples on one rank: what the layout's reference trains."""
        kept = ("family", "positions", "tied", "hidden", "depth", "pattern", "samples", "targets")
        return Layout(**{field.name: getattr(self, field.name) for field in fields(self) if field.name in kept})


def samples(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """Tokens of input and target; where losses are of targets, every fourth sample has none."""
    tokens = []
    for number in layout.samples:
        draw = np.random.default_rng(number)
        given, wanted = (draw.integers(3, VOCABULARY, n).tolist() for n in (INPUTS[number], TARGETS[number]))
        tokens.append((given + wanted, []) if layout.targets and number % 4 == 3 else (given, wanted))
    return tokens


def on_ranks(function: str, layout: Layout, *, deadline_s: float = 120, **arguments: object) -> list[Any]:
    """What "module.function" of this package returns on each rank of a layout, given the layout."""
    given = {"function": function, "layout": layout, "arguments": arguments}
    return run_ranks(_call, layout.ranks, given, deadline_s=deadline_s)


def _call(*, rank: int, world_size: int, function: str, layout: Layout, arguments: dict[str, Any]) -> Any:
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(f"tests.helpers.layouts.{module}"), name)(layout, **arguments)


@functools.cache
def reference(model: Layout) -> dict[str, Any]:
    """`reference.train_one_by_one` of a model: loss and gradients, losses and norms of five steps."""
    found: dict[str, Any] = on_ranks("reference.train_one_by_one", model)[0]
    return found


PHRASES: dict[str, dict[str, Any]] = {
    "two chunks": {"chunks": 2},
    "sequence parallel": {"sequence": True},
    "rotary positions": {"positions": "rope"},
    "relative positions": {"positions": "relative"},
    "no positions": {"positions": "none"},
    "untied": {"tied": False},
    "Megatron's attention": {"attention": "megatron"},
    "full": {"recompute": ("full",)},
    "selective": {"recompute": ("selective",)},
    "recompute mixed": {"recompute": MIXED},
    "recompute full and none": {"recompute": ("full", "none")},
    "of MLPs": {"modules": ("mlp",)},
    "also of MLPs": {"modules": ("core_attn", "mlp")},
    "packed": {"rows": "packed"},
    "rows mixed": {"rows": "mixed"},
    "divided": {"divided": 1},
    "every second divided": {"divided": 2},
    "rules of CUDA": {"transfers": "cuda"},
    "scatter-gather": {"scatter_gather": "on"},
    "overlapped": {"overlap": True},
    "distributed optimizer": {"distributed_optimizer": True},
    "one replica without samples": {"idle": 1},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16", "loss_scale": 64.0},
    "dropout": {"dropout": 0.1},
    "fused": {"fused": True},
    "fused loss": {"fused_loss": True},
    "Transformer Engine's layers": {"fused": True, "engine": True},
    "gathered in passes": {"gather": True},
    "samples reversed": {"samples": ALL[::-1]},
    "losses of targets": {"targets": True},
}
"""What a row of a table may say of a layout, besides numbers."""


def named(row: str) -> Layout:
    """The layout of "gpt 2x2x1, two chunks, layers 2.5+1.5": tensor x stages x replicas, then what else."""
    kind, *phrases = row.removesuffix(" *").split(", ")
    family, _, sizes = kind.partition(" ")
    given: dict[str, Any] = dict(zip(("tensor", "stages", "replicas"), map(int, sizes.split("x")), strict=True))
    for phrase in phrases:
        what, _, number = phrase.rpartition(" ")
        match what:
            case "teams":
                given["teams"] = tuple(tuple(map(int, teams.split("+"))) for teams in number.split("/"))
            case "then teams":
                given["then"] = tuple(map(int, number.split("+")))
            case "layers":
                split = tuple(float(each) if "." in each else int(each) for each in number.split("+"))
                given |= {"split": split, "depth": int(sum(split))}
            case "pattern":
                given |= {"pattern": number, "depth": len(number)}
            case "depth" | "hidden":
                given[what] = int(number)
            case "overhead":
                given["layer_overhead_us"] = float(number)
            case "slices of":
                given |= {"rows": "planned", "slices": int(number)}
            case _:
                given |= PHRASES[phrase]
    return Layout(family=family, **given)


def table(rows: Sequence[str]) -> list[Any]:
    """Parameters of a test, as `named` reads them: a row that ends with * runs every day, the others are slow."""
    slow = pytest.mark.slow
    return [pytest.param(named(row), id=row, marks=() if row.endswith("*") else slow) for row in rows]
