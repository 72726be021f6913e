"""Python attributes and globals that the code between modules reads: a trace holds for the values that they had.

They are compared in every step, on the user's model as long as it lives; where one has changed, the model is traced
again with its new value.
"""

import enum
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

Read = tuple[str, str]
"""The name of a module, and of the attribute that its code read."""

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, enum.Enum)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def is_read_by_user(name: str) -> bool:
    """Whether an attribute is none of those that every module has."""
    return name not in _OF_EVERY_MODULE and not hasattr(nn.Module, name)


class ReadAttributes:
    """What has been read of a model, and what it is now.

    Args:
        model: of the user; it may go.
        skeleton: its copy, which is traced.
        reads: attributes that tracing has read.
        divided: names of the modules whose code was traced.
    """

    def __init__(self, model: nn.Module, skeleton: nn.Module, reads: Iterable[Read], divided: Iterable[str]) -> None:
        self._model, self._skeleton = weakref.ref(model), skeleton
        held = {
            id(value) if hasattr(value := _value(skeleton, *read), "__dict__") else read: read for read in sorted(reads)
        }
        self._reads = sorted(read for read in held.values() if _plain(_value(skeleton, *read)) is not NotImplemented)
        forwards = dict.fromkeys(type(skeleton.get_submodule(name)).forward for name in sorted(divided))
        self._globals = [each for forward in forwards for each in _globals_of(forward)]
        self._last = self._values(skeleton)

    def state(self) -> str:
        """All values, to be compared; the skeleton takes those of the model."""
        if (model := self._model()) is not None and (now := self._values(model)) != self._last:
            self._last = now
            for name, attribute in self._reads:
                self._copy(_value(model, name, attribute), self._skeleton.get_submodule(name), attribute)
        return repr((self._last, [_plain(space.get(name), nested=True) for space, name in self._globals]))

    def _values(self, model: nn.Module) -> list[Any]:
        return [_plain(_value(model, name, attribute)) for name, attribute in self._reads]

    def _copy(self, value: Any, holder: nn.Module, attribute: str) -> None:
        if isinstance(changes := _plain(value), dict) and hasattr(value, "__dict__"):
            vars(getattr(holder, attribute)).update(changes)
        else:
            setattr(holder, attribute, value)


def _globals_of(function: Callable[..., Any]) -> list[tuple[dict[str, Any], str]]:
    """Names of plain values that a function's own code reads, and where they are."""
    function = inspect.unwrap(function)
    space, names = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
    used = names.co_names if names is not None else ()
    return [
        (space, name) for name in used if _plain(space.get(name, NotImplemented), nested=True) is not NotImplemented
    ]


def _value(model: nn.Module, name: str, attribute: str) -> Any:
    return getattr(model.get_submodule(name), attribute, None)


def _plain(value: Any, *, nested: bool = False) -> Any:
    """Numbers, words and collections of them; of another object, those that it holds; else NotImplemented."""
    match value:
        case tuple() | list() | set() | frozenset():
            # Equal sets may be walked in other orders, and words are in other processes.
            ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            found: Any = tuple(_plain(each, nested=True) for each in ordered)
            return NotImplemented if NotImplemented in found else found
        case Mapping():
            return {k: v for k, each in value.items() if (v := _plain(each, nested=True)) is not NotImplemented}
    if isinstance(value, _PLAIN):
        return value
    if nested or callable(value) or isinstance(value, torch.Tensor | ModuleType) or not hasattr(value, "__dict__"):
        return NotImplemented
    return _plain(vars(value))
