"""States of an optimizer and a schedule that Megatron would not take from a checkpoint, told before a model is built.

Megatron ends with a traceback where it does not find them under the names that it looks for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_dynapipe.integration.entry.resume_record import ResumeRecord
    from megatron_dynapipe.integration.flags.run_config import CheckpointConfig

_DISTRIBUTED = "planner.distributed_optimizer"
_WITHOUT = "--no-load-optim resumes the weights alone: the optimizer starts with empty states"


def check_states(
    checkpoints: "CheckpointConfig", folder: Path, *, saved: "ResumeRecord", record: "ResumeRecord"
) -> None:
    """Refuse an optimizer or a schedule that the checkpoint in `folder` is not of.

    Raises:
        ConfigError: says what differs, and by which flag to go on.
    """
    if checkpoints.loads_optimizer:
        _check_optimizer(folder, saved, record)
    if checkpoints.keeps_schedule:
        _check_schedule(saved.schedule, record.schedule)


def _check_optimizer(folder: Path, saved: "ResumeRecord", record: "ResumeRecord") -> None:
    was_distributed = saved.settings.get(_DISTRIBUTED)
    if was_distributed is not None and was_distributed != record.settings.get(_DISTRIBUTED):
        was = was_distributed == "true"
        raise ConfigError(
            f"expected {'' if was else 'no '}--use-distributed-optimizer, as in the run that saved {folder}: one"
            " optimizer cannot read the states that the other has saved",
            hint=f"{'add' if was else 'leave out'} --use-distributed-optimizer; {_WITHOUT}",
        )
    for what, before, now in (
        ("optimizer", saved.optimizer, record.optimizer),
        ("parameters", _precision(saved.settings), _precision(record.settings)),
    ):
        if before != now:
            raise ConfigError(
                f"expected the {what} whose states {folder} holds, {before}, got {now}",
                hint=f"resume with the flags that it was trained with; {_WITHOUT}",
            )


def _check_schedule(saved: Mapping[str, str], schedule: Mapping[str, str]) -> None:
    for name, value in schedule.items():
        # Not every schedule has every field.
        if saved.get(name, value) != value:
            raise other_schedule(name, saved[name], value)


def _precision(settings: Mapping[str, str]) -> str:
    """Whether the optimizer has parameters of its own beside the model's; empty where a record does not say."""
    halves = [settings[name] for name in ("fp16", "bf16") if name in settings]
    return "" if not halves else "of half precision" if "True" in halves else "in fp32"


def other_schedule(name: str, saved: str, value: str) -> ConfigError:
    """The error of a schedule that is not the checkpoint's."""
    return ConfigError(
        f"expected the checkpoint's {name}, {saved}, got {value}",
        hint="--override-opt-param-scheduler trains on with the values of this command line (another --train-iters"
        " or --lr), --use-checkpoint-opt-param-scheduler with the checkpoint's",
    )
