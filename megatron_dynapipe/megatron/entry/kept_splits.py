"""Layer splits that were chosen before: choosing takes seconds, and its inputs are the same at the next start.

A split is a pure function of what plans are made from, so it is kept under the digest of that, in the user's cache
folder, next to measured costs.
"""

import contextlib
import hashlib
from pathlib import Path

import msgspec

import megatron_dynapipe
from megatron_dynapipe.choosing.layer_split import MORE_CHUNKS, choose_layer_split
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.costing import LayerSplit, even_layer_split, parse_layer_split
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.files import read_bounded, user_cache_folder
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.outputs import replace_bytes
from megatron_dynapipe.service.first_batches import first_batches


def choose_or_recall(run: RunConfig) -> tuple[LayerSplit, bool]:
    """The layers per virtual stage that are predicted to be fastest, and whether they were chosen at an earlier start.

    A cache folder that cannot be read or written costs time, never the run. Raises as `chosen_layer_split`.
    """
    path = user_cache_folder() / f"split-{_identity(run)}.txt"
    if (kept := _read(path)) is not None:
        return kept, True
    layer_split = chosen_layer_split(run)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, (",".join(map(str, layer_split)) + "\n").encode())
    return layer_split, False


def _identity(run: RunConfig) -> str:
    causes = [run.inputs.digest(), run.plans_chunks, read_meta(run.data).content_hash]
    state = hashlib.blake2b(msgspec.json.encode(causes), digest_size=12)
    state.update(code_digest(Path(megatron_dynapipe.__path__[0])))
    return state.hexdigest()


def code_digest(package: Path) -> bytes:
    """Digest of all of the package's code: an upgrade may choose better, wherever choices are made by then."""
    state = hashlib.blake2b(digest_size=16)
    for file in sorted(package.rglob("*")):
        if file.suffix in (".py", ".so"):
            state.update(file.read_bytes())
    return state.digest()


def _read(path: Path) -> LayerSplit | None:
    try:
        return parse_layer_split(read_bounded(path).decode().strip(), expected="numbers of layers")
    except (OSError, UnicodeDecodeError, ConfigError):
        return None


def chosen_layer_split(run: RunConfig, *, halves: bool = True) -> LayerSplit:
    """The layers per virtual stage under which the run's first iterations are predicted fastest, the same on all ranks.

    Every sample of the data that fits under the even split fits under the chosen one. Without `halves` layers stay
    whole.

    Raises:
        ConfigError: more stages than layers.
        PlanningError: none of the iterations can be planned.
    """
    batches, epoch = first_batches(run.inputs)
    planner = run.planner
    even = even_layer_split(planner.model.layers, planner.layout.virtual_stages, halves=halves)
    settings = planner.with_layers_per_stage(even)
    more = MORE_CHUNKS if run.plans_chunks else ()
    return choose_layer_split(settings, run.inputs.costs.load(), batches, to_fit=[epoch], halves=halves, chunks=more)
