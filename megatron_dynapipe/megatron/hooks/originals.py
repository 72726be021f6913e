"""Names that are replaced in Megatron's modules and classes, and put back at a run's end."""

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynapipe.cpu.platform import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One replaced name.

    Attributes:
        owner: dotted path of the module or class that defines the name, or of the one module whose import of it is
            replaced.
        make: from the original to its replacement.
        parameters: the original's that the replacement relies on; tested on every supported version.
        everywhere: also rebind it in modules that imported it by value, Megatron's and a script's own.
        optional: some supported versions lack it, where nothing is replaced.
        why: what goes through it, or what goes wrong without it.
    """

    owner: str
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    parameters: tuple[str, ...]
    everywhere: bool = False
    optional: bool = False
    why: str


class Originals:
    """Names that are replaced, with what stood there; empty while none is."""

    def __init__(self) -> None:
        self._held: list[tuple[object, str, object]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def install(self, rows: Sequence[Replacement]) -> None:
        """Replace what a table says."""
        for row in rows:
            owner = resolve(row.owner)
            if row.optional and not hasattr(owner, row.name):
                continue
            original = getattr(owner, row.name)
            replacement = row.make(original)
            for holder in holders(row.name, original) if row.everywhere else [owner]:
                self.replace(holder, row.name, replacement)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace a name of a module or class, which need not be there yet."""
        self._held.append((owner, name, getattr(owner, name, self)))
        setattr(owner, name, value)

    def revert(self) -> None:
        """Put everything back, the last first; does nothing if nothing was replaced."""
        while self._held:
            owner, name, original = self._held.pop()
            if original is self:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def holders(name: str, original: object) -> list[object]:
    """The modules that hold an object under this name: where it is defined, or imported by value."""
    modules = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    return [module for module in modules if vars(module).get(name) is original]
