"""Names that are replaced in Megatron's modules and classes, and put back at a run's end."""

import sys
from typing import Any


class Originals:
    """What stood at the names that were replaced; empty while none is."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

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


def holders(name: str, original: Any) -> list[Any]:
    """Megatron's modules that hold an object under this name: where it is defined, or imported by value."""
    modules = [module for path, module in sys.modules.items() if path.startswith("megatron.") and module is not None]
    return [module for module in modules if vars(module).get(name) is original]
