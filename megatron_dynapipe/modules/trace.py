"""Writes down a model's work between its modules: its forward, run once on tensors without memory and written down.

    model.forward ──► n0 embedding(batch[ids])   segment 0
                      n1 + n0 …                  segment 0     ◄ operations between modules, one by one
                      n2 h.0(n1, mask)           segment 0     ◄ modules inside one segment, whole
                     ──── cut ────
                      n3 h.1(n2, mask)           segment 1

A module that no cut divides is one node, whatever happens inside: it runs later as the user wrote it, with its hooks,
its random numbers, its own control flow over sizes. Only what stands between such modules becomes a list of
operations. Control flow that depends on a tensor's values cannot be followed and is refused with its place.

Python attributes and globals that the code between modules reads are part of a trace, which holds for the values that
they had. They are compared in every step, on the user's model as long as it lives; where one has changed, the model is
traced again with its new value.
"""

import contextlib
import enum
import inspect
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.modules.record import Domain, ForwardRecorder, SymbolicBatch

Read = tuple[str, str]
"""The name of a module, and of the attribute that its code read."""

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, enum.Enum)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ReadAttributes:
    """The attributes and globals that a model's code reads, and their values."""

    def __init__(self, model: nn.Module, skeleton: nn.Module, reads: Iterable[Read], cut: Iterable[str]) -> None:
        self._model = weakref.ref(model)
        self._skeleton = skeleton
        reads_of = {
            id(value) if hasattr(value := _value(skeleton, *read), "__dict__") else read: read for read in sorted(reads)
        }
        self._reads = sorted(
            read for read in reads_of.values() if _plain(_value(skeleton, *read)) is not NotImplemented
        )
        forwards = dict.fromkeys(type(skeleton.get_submodule(name)).forward for name in sorted(cut))
        self._globals = [place for forward in forwards for place in _globals_of(forward)]
        self._last = self._values(skeleton)

    def state(self) -> str:
        """All values, to be compared; the skeleton takes the model's."""
        if (model := self._model()) is not None and (now := self._values(model)) != self._last:
            self._last = now
            for name, attribute in self._reads:
                self._copy(_value(model, name, attribute), self._skeleton.get_submodule(name), attribute)
        return repr((self._last, [_plain(space.get(name), nested=True) for space, name in self._globals]))

    def _values(self, model: nn.Module) -> list[Any]:
        return [_plain(_value(model, name, attribute)) for name, attribute in self._reads]

    def _copy(self, value: object, holder: nn.Module, attribute: str) -> None:
        if isinstance(changes := _plain(value), dict) and hasattr(value, "__dict__"):
            vars(getattr(holder, attribute)).update(changes)
        else:
            setattr(holder, attribute, value)


def _full_name(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"between modules the forward changes the attribute {name}; it is run once, not again in every step",
        hint="count and collect inside modules that no cut divides, or in local variables",
    )


def _globals_of(function: Callable[..., Any]) -> list[tuple[dict[str, Any], str]]:
    """Names of plain values that a function's own code reads, and where they are."""
    function = inspect.unwrap(function)
    space = getattr(function, "__globals__", {})
    names = getattr(function, "__code__", None)
    used = names.co_names if names is not None else ()
    return [
        (space, name) for name in used if _plain(space.get(name, NotImplemented), nested=True) is not NotImplemented
    ]


def _value(model: nn.Module, name: str, attribute: str) -> Any:
    return getattr(model.get_submodule(name), attribute, None)


def _plain(value: Any, *, nested: bool = False) -> Any:
    """Numbers, strings and collections of them; of another object, those that it holds; else NotImplemented."""
    match value:
        case tuple() | list() | set() | frozenset():
            # Equal sets may be walked in other orders, and words are in other processes.
            ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            plain: Any = tuple(_plain(element, nested=True) for element in ordered)
            return NotImplemented if NotImplemented in plain else plain
        case Mapping():
            return {k: v for k, element in value.items() if (v := _plain(element, nested=True)) is not NotImplemented}
    if isinstance(value, _PLAIN):
        return value
    if nested or callable(value) or isinstance(value, torch.Tensor | ModuleType) or not hasattr(value, "__dict__"):
        return NotImplemented
    return _plain(vars(value))


_HOST = torch.device("cpu")
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class CutPoint(nn.Module):
    """An identity that marks one place at which a pipeline stage may end.

    Each instance marks one place and is called once in a forward: `x = self.cut(x)`. Whatever
    else later stages need crosses the boundary by itself.
    """

    def forward(self, *values: object) -> Any:
        """Return its argument, or a tuple of several."""
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
    resolved: list[str] = []
    for name in names:
        matches = [name] if name in known else [full for full in known if full.endswith(f".{name}")]
        if len(matches) != 1:
            near = f"candidates are {', '.join(matches[:6])}" if matches else f"it has {', '.join(known[:12])}, …"
            raise ConfigError(
                f"expected the split point {name!r} to name one module of the model, got {len(matches)}",
                hint=f"give the full name; {near}",
            )
        resolved += matches
    if repeated := {name for name in resolved if resolved.count(name) > 1}:
        raise ConfigError(f"expected every split point once, got {', '.join(sorted(repeated))} more than once")
    return resolved


def containers(model: nn.Module, points: Sequence[str]) -> set[str]:
    """Names of the modules that are divided: the root, and whatever holds one of the points."""
    holding = {""}
    for point in points:
        parts = point.split(".")
        holding |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return holding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedForward:
    """A model's forward as a graph; see `record`.

    Attributes:
        graph: its nodes in the order in which they ran.
        sizes: numbers that the nodes take from the batch's sizes.
        points: names of the cuts in the order of the forward; there is one segment more.
        domain: sizes for which all this holds.
        reads: attributes of divided modules that their code read.
    """

    graph: fx.Graph
    sizes: Sequence[sympy.Expr]
    points: tuple[str, ...]
    domain: Domain
    reads: frozenset[Read]


def trace(
    model: nn.Module,
    batch: Mapping[str, Any],
    points: Sequence[str],
    *,
    device: torch.device = _HOST,
    autocast: torch.dtype | None = None,
) -> TracedForward:
    """Run a model's forward on a batch, both without memory; the model's values are neither read nor changed.

    Segments begin at the modules that `points` names, or end at its `CutPoint`s. The model will run on `device`, with
    operations cast to `autocast`, if it is given.

    Raises:
        ConfigError: a point is never reached or reached twice, control flow depends on data, or a value passes
            between modules in a way that cannot be followed; the message names the place.
    """
    symbolic = SymbolicBatch(batch, device)
    with symbolic.mode:
        weights: dict[str, torch.Tensor] = {name: _empty(p, device) for name, p in model.named_parameters()}
        weights |= {name: torch.empty_like(b, device=device) for name, b in model.named_buffers()}
    casting = torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext()
    with casting:
        recorder = ForwardRecorder(symbolic.values, weights, device)
    calls = _Calls(model, recorder, points)
    with contextlib.ExitStack() as stack:
        eager = torch.compiler.set_stance("force_eager")  # what is compiled is compiled when it runs
        for context in (
            _without_caches(model),
            eager,
            enable_python_dispatcher(),
            symbolic.mode,
            casting,
            recorder,
            calls,
        ):
            stack.enter_context(context)
        with _explained():
            graph = recorder.finish(torch.func.functional_call(model, weights, (), symbolic.values))
    calls.check()
    return TracedForward(
        graph=graph,
        sizes=list(recorder.sizes),
        points=tuple(calls.reached),
        domain=symbolic.domain(),
        reads=frozenset(calls.reads),
    )


class _Calls(contextlib.AbstractContextManager[None]):
    """Sees every call of a module while the block lasts, and tells the recorder of those that matter."""

    def __init__(self, model: nn.Module, recorder: ForwardRecorder, points: Sequence[str]) -> None:
        self._recorder = recorder
        self._points = list(points)
        self.reached: list[str] = []
        self.reads: set[Read] = set()
        self._names = {module: name for name, module in model.named_modules()}
        self._divided = containers(model, points)
        self._call = nn.Module.__call__
        self._set = nn.Module.__setattr__
        self._before: dict[Read, tuple[Any, str]] = {}
        self._made: set[nn.Module] = set()

    def __enter__(self) -> None:
        original = self._call
        original_set = self._set

        def call(module: nn.Module, *args: object, **kwargs: object) -> Any:
            return self._of(module, original, args, kwargs)

        def read(module: nn.Module, name: str) -> Any:
            self._note_read(module, name)
            return object.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            self._check_write(module, name, value)
            original_set(module, name, value)

        setattr(nn.Module, "__call__", call)  # noqa: B010  (methods, which mypy would not have assigned)
        setattr(nn.Module, "__getattribute__", read)  # noqa: B010  (likewise)
        setattr(nn.Module, "__setattr__", write)  # noqa: B010  (likewise)

    def __exit__(self, *_: object) -> None:
        setattr(nn.Module, "__call__", self._call)  # noqa: B010  (likewise)
        setattr(nn.Module, "__setattr__", self._set)  # noqa: B010  (likewise)
        del nn.Module.__getattribute__

    def _note_read(self, module: nn.Module, name: str) -> None:
        of_user = name not in _OF_EVERY_MODULE and not hasattr(nn.Module, name)
        if of_user and not self._recorder.inside and self._names.get(module) in self._divided:
            read = self._names[module], name
            if read not in self.reads:
                self.reads.add(read)
                if isinstance(value := vars(module).get(name), list | dict | set):
                    caller = sys._getframe(2)  # of the one that reads
                    place = f"{caller.f_code.co_filename}:{caller.f_lineno}, in {caller.f_code.co_name}"
                    self._before[read] = (len(value), _plain(value)), place

    def _check_write(self, module: nn.Module, name: str, value: Any) -> None:
        owner = self._names.get(module)
        if self._recorder.inside or (owner is not None and owner not in self._divided):
            return
        before = {**vars(module), **module._buffers, **module._parameters}.get(name, NotImplemented)
        if owner is None and (before is NotImplemented or module in self._made):
            self._made.add(module)  # in the forward, which may do with it as it likes
        elif value is not before and (_plain(value) is NotImplemented or _plain(value) != _plain(before)):
            raise _written(f"{name} of a global {type(module).__name__}" if owner is None else _full_name(owner, name))

    def check(self) -> None:
        """Refuse a point that the forward did not come to, and collections of the model that it has changed."""
        modules = {name: module for module, name in self._names.items()}
        for (owner, name), (before, place) in self._before.items():
            now = vars(modules[owner])[name]
            if (len(now), _plain(now)) != before:
                raise _written(f"{_full_name(owner, name)}, which it reads at {place}")
        if missing := [point for point in self._points if point not in self.reached]:
            raise ConfigError(
                f"expected the forward to reach every split point, but it never calls {', '.join(missing)}",
                hint="name modules that are called, not lists of them; every CutPoint must be called",
            )

    def _of(
        self, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        name = self._names.get(module)
        if name is None or self._recorder.inside:
            return _output(module, original, args, kwargs)
        if name in self._points:
            self._begin(name)
        if isinstance(module, CutPoint) or name in self._divided:
            return original(module, *args, **kwargs)
        return self._recorder.call_module(name, lambda: _output(module, original, args, kwargs), args, kwargs)

    def _begin(self, name: str) -> None:
        if name in self.reached:
            raise ConfigError(
                f"expected the forward to reach the split point {name} once, but it calls it twice",
                hint="make one CutPoint for every place; do not divide a model at a module that it calls repeatedly",
            )
        self.reached.append(name)
        self._recorder.segment += 1


def _output(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a module that is not divided; where its control flow depends on values (a loop over experts), a
    tensor like the first that it is given.
    """
    try:
        return call(module, *args, **kwargs)
    except _DATA_DEPENDENT:
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        if first is None or not first.is_floating_point():
            raise
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (first, *module.parameters()))
        return torch.empty_like(first).requires_grad_(trained)


def _empty(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Turn off the key and value caches of generation, which `transformers` leaves on in training."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what the tracing machinery raises into an error that names the place in the user's code."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error.message} ({_place(error)})", hint=error.hint) from error
    except _DATA_DEPENDENT as error:
        raise ConfigError(
            f"control flow or sizes depend on a tensor's values, which are not known before the model runs "
            f"({_place(error)})",
            hint="use torch.where or a mask instead of a Python condition on a tensor",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the forward fails with the example batch: {type(error).__name__}: {error} ({_place(error)})",
            hint="call the model with the same arguments, without a pipeline, to see whether it runs",
        ) from error


def _place(error: BaseException) -> str:
    """The innermost line of the traceback that is neither PyTorch's nor this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [f for f in frames if "/torch/" not in f.filename and "/megatron_dynapipe/" not in f.filename]
    if not of_user:
        return "in the model's forward"
    frame = of_user[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {(frame.line or '').strip()}"
