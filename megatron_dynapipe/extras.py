"""Packages that an extra of this one brings: planning needs none of them, and says which extra where one is missing."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator

from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.processes import importing

DISTRIBUTION = "megatron-dynapipe"

EXTRA_OF = {
    "datasets": "data",
    "jinja2": "data",
    "matplotlib": "plots",
    "megatron": "train",
    "plotly": "plots",
    "pyarrow": "data",
    "sympy": "train",
    "tokenizers": "data",
    "torch": "train",
    "transformers": "data",
}
"""The extra of `pyproject.toml` by the package that is imported."""


def missing(error: ModuleNotFoundError) -> InstallationError | None:
    """The error for an import that failed; None where no extra brings what was imported."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(package)
    if extra is None:
        return None
    return InstallationError(
        f"expected the package {package}, which the extra [{extra}] brings, found none",
        hint=from_clone(extra),
    )


def from_clone(extras: str, options: str = "") -> str:
    """How extras are installed of a package that no index has."""
    return f"pip install{options} -e '.{f'[{extras}]' if extras else ''}' in the clone of {DISTRIBUTION}"


def check_bridge() -> None:
    """Raise InstallationError, which names the extra, where there is no Megatron-Bridge."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        raise InstallationError(
            "expected the package megatron-bridge, which the extra [bridge] brings, found none",
            hint=from_clone("bridge"),
        )


@contextlib.contextmanager
def entry_imports() -> Iterator[None]:
    """Around an entry script's imports: what is not there ends the script with one line, a hint and status 2."""
    error = None
    if sys.version_info < (3, 12):  # noqa: UP036  (a script of a clone needs no installation)
        error = InstallationError(
            f"expected Python 3.12 or later, got {sys.version.split()[0]}",
            hint="`make setup` makes an environment with one, .venv",
        )
    else:
        try:
            with importing():
                yield
        except ModuleNotFoundError as absent:
            if (error := missing(absent)) is None:
                raise
        except InstallationError as unbuilt:
            error = unbuilt
    if error is not None:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(2)
