"""Whether this Megatron has what a run relies on, checked when it starts, whatever version it says.

    names      functions that are replaced or called, with the parameters that are passed
    calls      the calls in Megatron's loop that lead to them
    patches    in a patched checkout, every call that the patches add

Any Megatron that has all of this is accepted, whatever release it is.
"""

import dis
import functools
import importlib.util
import inspect
import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_dynapipe.checkout.version import INSTALL_HINT, found_version, megatron_folders
from megatron_dynapipe.core.errors import UnsupportedMegatronError
from megatron_dynapipe.cpu.platform import resolve
from megatron_dynapipe.megatron.hooks import active_run, gloo_reductions, repairs, replacements

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
TRAINING = "megatron.training.training"


type Name = tuple[str, str, tuple[str, ...]]
"""A module or class, a function in it or a class's method, and the parameters of it that are passed."""
type Call = tuple[str, str, str]
"""A module, a function in it, and what is called in its body."""

_SCHEDULE_PARAMETERS = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size"),
    *("decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "force_all_reduce"),
)
NAMES: tuple[Name, ...] = (
    *((row.owner, row.name, row.parameters) for row in replacements.TABLE if not row.optional),
    *((repairs.MODULE, f"{repairs.CLASS}.{patch.name}", patch.parameters) for patch in repairs.PATCHES),
    (gloo_reductions.MODULE, gloo_reductions.NAME, ("group", "device", "async_ops")),
    (SCHEDULES, "forward_step_calc_loss", ("model", "output_tensor", "loss_func", "config")),
    (SCHEDULES, "forward_backward_no_pipelining", _SCHEDULE_PARAMETERS),
    (SCHEDULES, "forward_backward_pipelining_without_interleaving", _SCHEDULE_PARAMETERS),
    ("megatron.core.models.hybrid.hybrid_block", "HybridStack", ("submodules", "post_layer_norm", "layer_type_list")),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel", ("hybrid_stack_spec", "hybrid_layer_pattern")),
    ("megatron.training.argument_utils", "pretrain_cfg_container_from_args", ()),
    ("megatron.training.arguments", "parse_and_validate_args", ("extra_args_provider", "args_defaults")),
    ("megatron.training.arguments", "validate_args", ("args",)),
    (
        *(TRAINING, "pretrain"),
        ("train_valid_test_dataset_provider", "model_type", "forward_step_func", "get_embedding_ranks"),
    ),
)
"""Functions that a run replaces, or calls."""

BUILDERS: tuple[Name, ...] = (
    ("megatron.training.argument_utils", "gpt_config_from_args", ("args", "config")),
    ("megatron.training.argument_utils", "hybrid_config_from_args", ("args", "config")),
    ("megatron.training.models.dist_utils", "build_virtual_pipeline_stages", ()),
    ("megatron.training.models.gpt", "default_layer_spec", ("config", "vp_stage")),
)
"""What entry scripts have Megatron build models by; a patched checkout builds its own."""

CALLS: tuple[Call, ...] = (
    (TRAINING, "train", "get_forward_backward_func"),
    (TRAINING, "train", "train_step"),
    (TRAINING, "evaluate", "get_forward_backward_func"),
    *((TRAINING, "train", name) for name in active_run.COUNTERS),
)
"""How Megatron's loop comes to what is replaced, and the counters that it keeps in its namespace."""

PATCHES: tuple[Call, ...] = (
    ("megatron.training.arguments", "parse_args", "add_arguments"),
    ("megatron.training.arguments", "parse_args", "check_arguments"),
    (TRAINING, "pretrain", "dataset_provider"),
    (TRAINING, "pretrain", "finish"),
)
"""Calls of `checkout_hooks` in a patched checkout."""


@functools.cache
def check(*, builds: bool = True) -> None:
    """Check what every run relies on, and one for which Megatron `builds` models, once.

    Raises:
        UnsupportedMegatronError: there is no Megatron, or something is not there or not as it must be; says all of it.
    """
    version = found_version()
    names = (*NAMES, *BUILDERS) if builds else NAMES
    missing = [*filter(None, map(missing_name, names)), *missing_calls(CALLS)]
    if missing:
        raise UnsupportedMegatronError(
            f"Megatron {version} at {_place()} lacks what planned runs rely on: {'; '.join(missing)}", hint=INSTALL_HINT
        )


def check_patches() -> None:
    """Check that a patched checkout makes every call of the patches.

    Raises:
        UnsupportedMegatronError: some are missing; says which.
    """
    missing = missing_calls(PATCHES, through="dynapipe")
    if missing:
        raise UnsupportedMegatronError(
            f"the patched checkout at {_place()} lacks calls of the patches: {'; '.join(missing)}",
            hint="`megatron-dynapipe patch CHECKOUT --check` says what each file is; reverse and patch it anew",
        )


def missing_name(row: Name) -> str:
    """The part of a name that is not there, in words; empty if all is."""
    module, name, parameters = row
    try:
        function = functools.reduce(getattr, name.split("."), resolve(module))
    except (ImportError, AttributeError):
        return f"no {name} in {module}"
    accepted = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    absent = [parameter for parameter in parameters if parameter not in accepted]
    return f"{name} of {module} takes no {', '.join(absent)}" if absent and not takes_any else ""


def missing_calls(rows: Sequence[Call], through: str | None = None) -> list[str]:
    """The calls that are not there; a patch's calls go `through` the module's name."""
    missing = []
    for module, function, callee in rows:
        code = _functions(module).get(function)
        names: Sequence[str] = code.co_names if code else ()
        if code and through:  # a name may be another module's, too
            steps = (step.argval for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG")
            names = [called for name, called in pairwise(steps) if name == through]
        if callee not in names:
            missing.append(f"{function}() of {module} calls no {callee}")
    return missing


@functools.cache
def _functions(module: str) -> dict[str, types.CodeType]:
    """A module's functions as its file has them: a script may have replaced some by wrappers of its own."""
    spec = importlib.util.find_spec(module)
    loader: Any = spec and spec.loader
    code = loader.get_code(module) if loader else None
    constants = code.co_consts if code else ()
    return {constant.co_name: constant for constant in constants if isinstance(constant, types.CodeType)}


def _place() -> str:
    folders = megatron_folders()
    return str(folders[0].parent) if folders else "?"
