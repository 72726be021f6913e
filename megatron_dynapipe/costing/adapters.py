"""Low-rank adapters of frozen weights, LoRA's or DoRA's: what a layer multiplies, keeps and trains with them.

    x ─┬─► W, frozen ──────────────► + ─►    forward    2 · (in · out + r · (in + out)) FLOPs a position
       └─► A, r × in ─► B, out × r ──┘       backward   x's gradient through all three, weights' of A and B alone

DoRA scales every output by a trained magnitude, over the norm of its row of W + B·A, which each forward computes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import check_fields

Linear = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
ATTENTION_LINEARS: tuple[Linear, ...] = ("linear_qkv", "linear_proj")
MLP_LINEARS: tuple[Linear, ...] = ("linear_fc1", "linear_fc2")
DIVIDED_INPUTS: tuple[Linear, ...] = ("linear_proj", "linear_fc2")
"""Those whose inputs tensor-parallel ranks divide; of the others they divide the outputs."""
Kind = Literal["lora", "dora"]
DEFAULT_DIM = 32
"""Megatron-Bridge's own defaults."""

_PARTS: Mapping[str, Linear] = {
    **{f"linear_{part}": "linear_qkv" for part in ("q", "k", "v")},
    **{f"linear_fc1_{part}": "linear_fc1" for part in ("up", "gate")},
}
"""What `CanonicalLoRA` adapts each alone, which is counted as the whole."""
_KINDS: Mapping[str, Kind] = {"LoRA": "lora", "CanonicalLoRA": "lora", "DoRA": "dora"}


class Adapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters of a model, all of whose other weights are frozen.

    Attributes:
        kind: the kind of adapters.
        dim: r, the width between A and B.
        linears: each layer's linears that have one.
        dropout: whether there is any before A, whose output is kept.
    """

    kind: Kind = "lora"
    dim: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = DEFAULT_DIM
    linears: tuple[Linear, ...] = ATTENTION_LINEARS + MLP_LINEARS
    dropout: bool = False

    @classmethod
    def of_recipe(cls, peft: object) -> "Adapters":
        """Those that a recipe of Megatron-Bridge asks for.

        Args:
            peft: that part of its saved YAML, with the class under `_target_`.

        Raises:
            ConfigError: they are of another kind, adapt none of the `linears`, or have no such width.
        """
        if not isinstance(peft, Mapping):
            raise ConfigError(f"expected adapters as a mapping under peft, got {type(peft).__name__}")
        name = str(peft.get("_target_", "")).rpartition(".")[2]
        if name not in _KINDS:
            raise ConfigError(
                f"expected adapters of {', '.join(_KINDS)} under peft, got {name or peft}",
                hint="measure costs in place of computing them, or set config.peft to one of these",
            )
        linears = _adapted(_names(peft, "target_modules"), _names(peft, "exclude_modules"))
        if not linears:
            raise ConfigError(f"expected adapters of linear layers, got target_modules {peft.get('target_modules')}")
        dim = peft.get("dim", DEFAULT_DIM)
        return cls(kind=_KINDS[name], dim=dim, linears=linears, dropout=bool(peft.get("dropout", 0.0)))

    def __post_init__(self) -> None:
        check_fields(self)


def described(adapters: Adapters | None) -> str:
    """Adapters in words; if all weights are trained, there are none."""
    if adapters is None:
        return "no adapters"
    dropped = " with dropout" if adapters.dropout else ""
    return f"{adapters.kind} adapters of width {adapters.dim}{dropped} on {', '.join(adapters.linears)}"


def _names(peft: Mapping[str, object], key: str) -> Sequence[str]:
    names = peft.get(key) or ()
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"expected a list of names as {key} of peft, got {names!r:.60}")
    return names


def _adapted(targets: Sequence[str], without: Sequence[str]) -> tuple[Linear, ...]:
    """The linears that patterns such as `*.layers.0.*.linear_qkv` name; a pattern of some layers counts for all."""
    last = {pattern.rpartition(".")[2] for pattern in targets}
    left_out = {pattern.rpartition(".")[2] for pattern in without}
    return tuple(
        linear
        for linear in ATTENTION_LINEARS + MLP_LINEARS
        if (linear in last or any(_PARTS.get(name) == linear for name in last) or not last) and linear not in left_out
    )
