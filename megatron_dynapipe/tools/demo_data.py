"""The demo mixture: text tasks of different lengths from the Python standard library's own source.

    function_summary   a function's source without its docstring → the docstring's first line
    signature          a docstring's first paragraph → the function's signature
    module_summary     the beginning of a module's source → the first line of its docstring

The rows depend on the files alone, that is, on the Python version.
"""

import ast
import hashlib
import platform
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.data.identity import manifest_path
from megatron_dynapipe.data.meta import DatasetMeta, read_meta
from megatron_dynapipe.sampling.long_samples import LongSamples
from megatron_dynapipe.tools.prepare import PrepareSettings, TextSample, prepare_dataset

VOCABULARY_SIZE = 4096
MAX_INPUT_LENGTH = 1536
MAX_TARGET_LENGTH = 256
SAMPLES_PER_TASK = 2000

_RECIPE = 3
"""Raised when the demo's text or settings change, so that a folder of an earlier form is made again."""
_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_MODULE_CHARACTERS = 4000
_DOCSTRING_CHARACTERS = 600
_TARGET_CHARACTERS = 300
_LEAST_TEXT = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def demo_source() -> str:
    """The manifest's words on a demo folder made by this Python."""
    return f"Python {platform.python_version()} standard library, recipe {_RECIPE}"


def build_demo(output: Path) -> DatasetMeta:
    """Write the demo dataset to `output`, unless it is there already, made by the same Python and recipe.

    Raises:
        DataError: `output` holds something else, or this Python came without its source.
    """
    if _up_to_date(output):
        return read_meta(output)
    settings = PrepareSettings(
        source=demo_source(),
        vocabulary_size=VOCABULARY_SIZE,
        max_input_length=MAX_INPUT_LENGTH,
        max_target_length=MAX_TARGET_LENGTH,
        long_samples=LongSamples.SKIP,
    )
    return prepare_dataset(stdlib_samples(SAMPLES_PER_TASK), output, settings)[0]


def _up_to_date(output: Path) -> bool:
    """Whether `output` is the dataset that would be written; a folder is in place only when it is whole."""
    if not manifest_path(output).is_file():
        return False
    try:
        return read_meta(output).source == demo_source()
    except DataError:
        return False


def stdlib_samples(samples_per_task: int, folder: Path | None = None) -> list[TextSample]:
    """At most `samples_per_task` samples of each task, chosen by the digest of their text, in the order of the files.

    Raises:
        DataError: the standard library's source is not there, or not enough of it.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    by_task: dict[str, list[TextSample]] = {"function_summary": [], "signature": [], "module_summary": []}
    for path in _source_files(root):
        for sample in samples_of_source(path.read_bytes()):
            by_task[sample.task].append(sample)
    missing = [task for task, samples in by_task.items() if not samples]
    if missing:
        raise DataError(
            f"expected the source of Python's standard library in {root}, found none for {', '.join(missing)}",
            hint="use a Python that was installed with its .py files",
        )
    return [sample for samples in by_task.values() for sample in _choose(samples, samples_per_task)]


def samples_of_source(source: bytes) -> Iterator[TextSample]:
    """The samples of one Python file; none if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            module = ast.parse(source)
            text = source.decode("utf-8")
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    yield from _module_sample(module, lines)
    for node in ast.walk(module):
        if isinstance(node, Function):
            yield from _function_samples(node, lines)


def _module_sample(module: ast.Module, lines: list[str]) -> Iterator[TextSample]:
    docstring = ast.get_docstring(module)
    if docstring is None:
        return
    body = _without_docstring(module.body[0], lines, 1, len(lines))
    if len(body) > _MODULE_CHARACTERS:
        body = body[: body.rfind("\n", 0, _MODULE_CHARACTERS)]
    yield from _sample("module_summary", f"summarize module:\n{body}", _first_line(docstring))


def _function_samples(node: Function, lines: list[str]) -> Iterator[TextSample]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    signature = f"def {node.name}({ast.unparse(node.args)})"
    if node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    paragraph = docstring.strip().split("\n\n")[0][:_DOCSTRING_CHARACTERS]
    yield from _sample("signature", f"write signature:\n{paragraph}", signature[:_TARGET_CHARACTERS])
    if len(node.body) > 1:
        body = _without_docstring(node.body[0], lines, node.lineno, node.end_lineno or node.lineno)
        yield from _sample("function_summary", f"summarize function:\n{body}", _first_line(docstring))


def _sample(task: str, text: str, target: str) -> Iterator[TextSample]:
    if len(target) >= _LEAST_TEXT:
        yield TextSample(task=task, input=text, target=target)


def _first_line(docstring: str) -> str:
    return docstring.strip().partition("\n")[0].strip()[:_TARGET_CHARACTERS]


def _without_docstring(docstring: ast.stmt, lines: list[str], first: int, last: int) -> str:
    """Lines `first` to `last` (from 1, both included), dedented, without the docstring's."""
    kept = lines[first - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : last]
    return textwrap.dedent("\n".join(kept)).strip("\n")


def _source_files(root: Path) -> list[Path]:
    """The library's modules in the order of their names, without tests and without installed packages."""
    return [
        path
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts)
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    ]


def _choose(samples: list[TextSample], count: int) -> list[TextSample]:
    """The `count` samples of smallest digest, each text once, in their old order."""
    unique = list(dict.fromkeys(samples))
    digests = [hashlib.blake2b(f"{sample.input}\0{sample.target}".encode()).digest() for sample in unique]
    chosen = sorted(range(len(unique)), key=lambda at: digests[at])[:count]
    return [unique[at] for at in sorted(chosen)]
