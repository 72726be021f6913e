"""What planned runs rely on in Megatron-Bridge: names, the calls in its loop that lead to them, what is replaced.

Checked at every start, whatever version Bridge says it is.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_dynapipe.core.errors import UnsupportedMegatronError
from megatron_dynapipe.extras import check_bridge
from megatron_dynapipe.megatron.hooks.compatibility import SCHEDULES, Call, Name, missing_calls, missing_name
from megatron_dynapipe.megatron.hooks.originals import Replacement
from megatron_dynapipe.megatron.hooks.replacements import TABLE
from megatron_dynapipe.megatron.profiling import adapters

TESTED = "0.6.2"
"""The version that the tests run with."""
_TRAINING = "megatron.bridge.training"

NAMES: tuple[Name, ...] = (
    (f"{_TRAINING}.pretrain", "pretrain", ("config", "forward_step_func", "callbacks")),
    (f"{_TRAINING}.pretrain", "_maybe_destroy_process_group", ("should_destroy",)),
    (f"{_TRAINING}.gpt_step", "get_batch_from_iterator", ("data_iterator", "include_full_batch_fields")),
    ("megatron.bridge.data.base", "DatasetProvider.build_datasets", ("context",)),
    ("megatron.bridge.data.utils", "get_dataset_provider", ("dataset_config",)),
    ("megatron.bridge.data.loaders", "get_train_valid_test_num_samples", ("cfg",)),
    ("megatron.bridge.training.tokenizers.tokenizer", "build_tokenizer", ("config",)),
    ("megatron.bridge.data.datasets.gpt_sft", "GPTSFTDataset.collate_fn", ("batch",)),
    *adapters.NAMES,
    (f"{_TRAINING}.config", "ConfigContainer.to_dict", ()),
    (f"{_TRAINING}.config", "ConfigContainer.to_yaml", ("yaml_path",)),
    (SCHEDULES, "get_forward_backward_func", ()),
    ("megatron.core.rerun_state_machine", "get_rerun_state_machine", ()),
)
"""Functions and classes that are called, each with the parameters that are relied on."""

CALLS: tuple[Call, ...] = (
    (f"{_TRAINING}.pretrain", "_pretrain", "_maybe_destroy_process_group"),
    (f"{_TRAINING}.train", "train", "get_forward_backward_func"),
    (f"{_TRAINING}.train", "train", "current_iteration"),
    (f"{_TRAINING}.train", "train", "train_step"),
    (f"{_TRAINING}.eval", "evaluate", "get_forward_backward_func"),
    (f"{_TRAINING}.setup", "setup", "_build_distributed_model"),
    (f"{_TRAINING}.setup", "setup", "setup_data_iterators"),
)
"""How Bridge's loop comes to a schedule function and to iterators, and where it says the iteration."""

_NORM = 5
"""Place of the gradient norm in the results of `train_step`; the losses are the first."""
_SHARED = ("compile_helpers", "get_write_results_queue", "async_loop")
"""Replacements in megatron-core that a run in Bridge's loop needs as one in Megatron's does."""


def replacements(
    schedule: Callable[..., object], before_model: Callable[[object], None], close: Callable[[], None]
) -> tuple[Replacement, ...]:
    """The replacements while a run trains: of a schedule function, what comes before the model, and what closes it."""

    def planning(factory: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(factory)
        def get_forward_backward_func(*_arguments: object, **_keywords: object) -> Callable[..., object]:
            return schedule

        return get_forward_backward_func

    def laying_out(build: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(build)
        def build_distributed_model(config: Any, pg_collection: Any) -> Any:
            before_model(pg_collection)
            return build(config, pg_collection)

        return build_distributed_model

    def closing(destroy: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(destroy)
        def destroy_process_group(*arguments: object, **keywords: object) -> Any:
            close()
            return destroy(*arguments, **keywords)

        return destroy_process_group

    return (
        Replacement(
            owner=SCHEDULES,
            name="get_forward_backward_func",
            make=planning,
            parameters=(),
            everywhere=True,
            why="the factory by which train and evaluate pick a schedule function",
        ),
        Replacement(
            owner=f"{_TRAINING}.setup",
            name="_build_distributed_model",
            make=laying_out,
            parameters=("cfg", "pg_collection"),
            why="builds the model of a settled recipe, whose layers are laid out before",
        ),
        Replacement(
            owner=f"{_TRAINING}.pretrain",
            name="_maybe_destroy_process_group",
            make=closing,
            parameters=("should_destroy",),
            why="destroys the groups at the end of pretrain, over which a run tells its ranks that no plan comes",
        ),
    )


def shared() -> tuple[Replacement, ...]:
    """The replacements that every run needs, without plans, too."""
    return tuple(replace(row, everywhere=True) for row in TABLE if row.name in _SHARED)


def step_recorder(before: Callable[[Any], None], after: Callable[..., None]) -> Replacement:
    """The replacement that shows a certificate each training step.

    Args:
        before: called with this rank's chunks.
        after: called with them, the optimizer, the iteration's reduced losses, which the last stages have, and its
            gradient norm.
    """

    def recording(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def train_step(*arguments: object, **keywords: object) -> Any:
            given = inspect.signature(step).bind(*arguments, **keywords).arguments
            before(given["model"])
            results = step(*arguments, **keywords)
            after(given["model"], given["optimizer"], results[0], results[_NORM])
            return results

        return train_step

    return Replacement(
        owner=f"{_TRAINING}.train",
        name="train_step",
        make=recording,
        parameters=("model", "optimizer"),
        why="moves the weights, and its results have an iteration's losses and gradient norm, for a certificate",
    )


@functools.cache
def check() -> None:
    """Check, once, what every run relies on.

    Raises:
        InstallationError: there is no Megatron-Bridge.
        UnsupportedMegatronError: something is not there or not as it must be; says all of it.
    """
    check_bridge()
    missing = [*filter(None, map(missing_name, NAMES)), *missing_calls(CALLS)]
    if missing:
        version = importlib.metadata.version("megatron-bridge")
        raise UnsupportedMegatronError(
            f"Megatron-Bridge {version} lacks what planned runs rely on: {'; '.join(missing)}",
            hint=f"install megatron-bridge {TESTED}, with which planned runs are tested",
        )
