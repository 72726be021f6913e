"""The meter of `make check`: what it counts, and that folding shows."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "count_code.py"


@pytest.fixture(scope="module")
def meter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_code", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["count_code"] = module
    spec.loader.exec_module(module)
    return module


PLAIN = '''"""A docstring, of many words that nobody counts."""

def both(a):  # a comment
    """Another
    of two lines."""
    first = a
    second = f"{a}!"
    return first, second
'''


def test_docstrings_and_comments_are_no_tokens_and_their_lines_no_lines(meter: ModuleType) -> None:
    # def both ( a ) : · first = a · second = f" { a } · return first , second
    assert meter.count_tokens(PLAIN) == (6 + 3 + 6 + 4, 4)


def test_two_statements_as_one_are_denser(meter: ModuleType) -> None:
    folded = PLAIN.replace('first = a\n    second = f"{a}!"', 'first, second = a, f"{a}!"')
    assert meter.tokens_a_line([folded]) > meter.tokens_a_line([PLAIN])


def test_the_core_is_what_the_reading_path_names(meter: ModuleType) -> None:
    design = (
        "# Design\n\n## Reading path\n\n| file | says |\n|---|---|\n| `plan/a.py` | b |\n\n## Rooms\n\n| `c.py` | d |\n"
    )
    assert meter.reading_path(design) == ["plan/a.py"]
    core = meter.reading_path(meter.DESIGN.read_text(encoding="utf-8"))
    assert len(core) > 10 and all((meter.PACKAGE / name).is_file() for name in core)


def test_the_longest_function_is_counted_without_its_decorators(meter: ModuleType) -> None:
    assert meter.longest_function(meter.ast.parse("@a\n@b\ndef f():\n    return 1\n\n\ndef g(): ...\n")) == 2
