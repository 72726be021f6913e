"""Changing what a built module does without replacing it.

A module's class becomes a subclass of its own: parameters, their names, hooks, process groups, sharded states and all
that the constructor computed stay, so that nothing has to be carried over, before or after a data-parallel wrapper is
around it. The subclass keeps the name, since Megatron-Bridge finds how a weight is divided by the name of its module's
class (`param_mapping.AutoMapping`).
"""

import functools
from typing import Any


def become(module: Any, mixin: type, **state: object) -> None:
    """Put a mixin before a module's own class.

    Args:
        module: any module; one that has the mixin already gets the state alone.
        mixin: methods that call `super()` for the module's own.
        state: attributes that the mixin asks for.
    """
    if not isinstance(module, mixin):
        own: Any = type(module)
        module.__class__ = _subclass(own, mixin)
    vars(module).update(state)


@functools.cache
def _subclass(own: Any, mixin: type) -> type:
    return type(own.__name__, (mixin, own), {"__module__": own.__module__, "__doc__": own.__doc__})
