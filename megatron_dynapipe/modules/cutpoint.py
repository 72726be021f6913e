"""Where a model may be divided: marks inside it, or names of its modules."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_dynapipe.errors import ConfigError


class CutPoint(nn.Module):
    """An identity that marks one place at which a pipeline stage may end.

    Each instance marks one place and is called once in a forward: `x = self.cut(x)`. What else is needed later, beside
    what passes through it, crosses the boundary by itself.
    """

    def forward(self, *values: Any) -> Any:
        """Give back what was given: a value, or a tuple of several."""
        return values[0] if len(values) == 1 else values


def cut_points(model: nn.Module) -> list[str]:
    """Names of the `CutPoint`s inside a model, in the order in which they were registered."""
    return [name for name, module in model.named_modules() if isinstance(module, CutPoint)]


def resolve_split_points(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Full names of the modules at which stages begin.

    A name may leave out what stands before it in the model: "h.3" finds "transformer.h.3".

    Raises:
        ConfigError: no module or several have that name, or one is named twice.
    """
    known = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for name in names:
        matches = [name] if name in known else [full for full in known if full.endswith(f".{name}")]
        if len(matches) != 1:
            near = f"candidates are {', '.join(matches[:6])}" if matches else f"it has {', '.join(known[:12])}, …"
            raise ConfigError(
                f"expected the split point {name!r} to name one module of the model, got {len(matches)}",
                hint=f"give the full name; {near}",
            )
        found += matches
    if repeated := {name for name in found if found.count(name) > 1}:
        raise ConfigError(f"expected every split point once, got {', '.join(sorted(repeated))} more than once")
    return found


def containers(model: nn.Module, points: Sequence[str]) -> set[str]:
    """Names of the modules that are divided: the root, and whatever holds one of the points."""
    holding = {""}
    for point in points:
        parts = point.split(".")
        holding |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return holding
