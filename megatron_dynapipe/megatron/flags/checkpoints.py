"""Megatron's checkpoints of a run, by its arguments: where they lie, and which one training goes on from.

A run reads the trackers before Megatron does. If Megatron cannot read one, it ends with status 0; if there is none, it
starts from iteration 0 and writes over the checkpoints that are there.
"""

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.checkout.version import found_version
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.megatron.flags.model_record import model_fields, training_fields

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, in the folder of checkpoints: the iteration of the last complete one."""
RELEASE = "release"
"""A tracker's word for a checkpoint that no run saved, and its folder's name."""

_WRITTEN_LAST = ("metadata.json", "dynapipe.json")
"""A complete checkpoint has one of these files."""


def check_trackers(args: argparse.Namespace) -> None:
    """Refuse folders of checkpoints whose tracker does not say which is the last; no file changes.

    Raises:
        ConfigError: a tracker is damaged, or missing next to complete checkpoints, or where
            `--exit-on-missing-checkpoint` asks for one; or what it names is of a Megatron later than this one; or
            there is no checkpoint of `--ckpt-step`.
    """
    emergency = getattr(args, "non_persistent_global_ckpt_dir", None)
    named = [args.load, args.save, args.pretrained_checkpoint, emergency]
    folders = [Path(folder) for folder in dict.fromkeys(named) if folder is not None]
    for folder in [*folders, *(folder / "non_persistent" for folder in folders)]:
        tracker = folder / TRACKER
        if os.path.lexists(tracker):
            last = _check_readable(tracker)
            if str(folder) in (args.load, args.pretrained_checkpoint):
                number = getattr(args, "ckpt_step", None) or last
                _check_format(folder / (RELEASE if number == RELEASE else f"iter_{int(number):07d}"))
        elif (complete := _complete(folder)) and not (getattr(args, "ckpt_step", None) and str(folder) == args.load):
            last = complete[-1].removeprefix("iter_").lstrip("0") or "0"
            raise ConfigError(
                f"expected {TRACKER} next to the checkpoints {', '.join(complete[-3:])} in {folder}, found none: the"
                " run would begin anew and write over them",
                hint=f"to go on: echo {last} > {tracker}; to begin anew, move them or give --save another folder",
            )
    if getattr(args, "ckpt_step", None) and args.load is not None:
        _check_there(Path(args.load), int(args.ckpt_step))
    there = getattr(args, "ckpt_step", None) or any(os.path.lexists(folder / TRACKER) for folder in folders)
    if args.exit_on_missing_checkpoint and not there:
        raise ConfigError(
            f"expected a checkpoint to load, found no {TRACKER} in {', '.join(map(str, folders)) or '--load'}",
            hint="--exit-on-missing-checkpoint asks for one; leave it out to begin anew",
        )


def _check_readable(tracker: Path) -> str:
    """The checkpoint that a tracker names, an iteration or `release`; refuses one that Megatron cannot read."""
    hint = f"write the number of the last complete checkpoint in {tracker.parent} into it, or move it away"
    try:
        text = read_bounded(tracker, most_bytes=100).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"cannot read which checkpoint is the last from {tracker}: {reason}", hint=hint) from error
    if text != RELEASE and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"expected an iteration or {RELEASE!r} in {tracker}, found {text!r}", hint=hint)
    return text


def _check_there(folder: Path, step: int) -> None:
    """Refuse a `--ckpt-step` that a folder has no checkpoint of."""
    if not (folder / f"iter_{step:07d}").is_dir():
        complete = [name.removeprefix("iter_").lstrip("0") or "0" for name in _complete(folder)]
        raise ConfigError(
            f"expected a checkpoint of --ckpt-step {step} in {folder}, found {', '.join(complete) or 'none'}",
            hint="name one of them, or leave --ckpt-step out to load the last",
        )


def _check_format(checkpoint: Path) -> None:
    """Refuse in Megatron 0.18 what 0.19 saved: it looks for a file that is no longer written."""
    is_later = (checkpoint / ".metadata").is_file() and not (checkpoint / "common.pt").is_file()
    if is_later and found_version().startswith("0.18."):
        raise ConfigError(
            f"expected a checkpoint that Megatron {found_version()} can read, found one without common.pt, as Megatron"
            f" 0.19 and later save them: {checkpoint}",
            hint="load it with megatron-core 0.19 or later",
        )


def _complete(folder: Path) -> list[str]:
    """Names of the checkpoints in a folder that were written to their end, the last one last."""
    folders = [*folder.glob(RELEASE), *sorted(folder.glob("iter_" + "[0-9]" * 7))]
    return [path.name for path in folders if any((path / name).is_file() for name in _WRITTEN_LAST)]


def checkpoint_of(checkpoints: Path, iteration: int | None) -> Path | None:
    """The folder of the checkpoint of an iteration; None where there is none."""
    return None if iteration is None else checkpoints / f"iter_{iteration:07d}"


def last_iteration(checkpoints: Path, tracker: str = TRACKER) -> int | None:
    """The iteration in a folder's tracker; None where there is no checkpoint, or a release, which is no run's."""
    try:
        return int(read_bounded(checkpoints / tracker, most_bytes=100))
    except (OSError, ValueError):
        return None


def newest(checkpoints: Path) -> Path | None:
    """The checkpoint that a folder's tracker names, which may be a release; None where it names none."""
    last = last_iteration(checkpoints)
    if last is not None:
        return checkpoint_of(checkpoints, last)
    with suppress(OSError):
        if read_bounded(checkpoints / TRACKER, most_bytes=100).strip() == RELEASE.encode():
            return checkpoints / RELEASE
    return None


class Checkpoints:
    """A view of Megatron's namespace and of the model's configuration.

    Args:
        args: as checked by Megatron.
        model: Megatron's own configuration of the model.
    """

    def __init__(self, args: argparse.Namespace, model: "TransformerConfig") -> None:
        self.args = args
        self._model = model

    @property
    def save(self) -> Path | None:
        """The folder of those that are saved."""
        return None if self.args.save is None else Path(self.args.save)

    @property
    def local_folder(self) -> Path | None:
        """Where Megatron saves this rank's part of those that one layout can load."""
        is_local = getattr(self.args, "non_persistent_ckpt_type", None) == "local"
        return Path(self.args.non_persistent_local_ckpt_dir, str(self.args.rank)) if is_local else None

    @property
    def load_in_one_layout(self) -> bool:
        """Whether what Megatron saves loads only in the layout that saved it."""
        is_tied = self.args.use_distributed_optimizer and not getattr(
            self.args, "dist_ckpt_optim_fully_reshardable", True
        )
        return is_tied or self.local_folder is not None or self.args.ckpt_format != "torch_dist"

    @property
    def loads_optimizer(self) -> bool:
        """Whether Megatron takes the optimizer's states from the checkpoint."""
        return not (self.args.finetune or self.args.no_load_optim)

    @property
    def model(self) -> dict[str, str]:
        """What makes it this model, field by field."""
        return model_fields(self._model, self.args)

    @property
    def training(self) -> dict[str, str]:
        """How the model is trained, as far as its configuration says so."""
        return {**training_fields(self._model), "optimizer": self.args.optimizer}

    def emergency_folder(self, checkpoints: Path) -> Path | None:
        """Where Megatron saves non-persistent checkpoints that every layout can load; None if it saves none."""
        if getattr(self.args, "non_persistent_ckpt_type", None) != "global":
            return None
        return Path(self.args.non_persistent_global_ckpt_dir or checkpoints / "non_persistent")

    def resumed(self) -> Path | None:
        """The folder of the checkpoint that Megatron is going to go on from; None if there is none."""
        if self.args.load is None:
            return None
        folder = Path(self.args.load)
        lasting = getattr(self.args, "ckpt_step", None) or last_iteration(folder)
        local = self.local_folder
        if local is not None and (here := last_local(local)) is not None and here >= (lasting or 0):
            return local
        other = self.emergency_folder(folder)
        if other is not None and (last := last_iteration(other)) is not None and last >= (lasting or 0):
            return checkpoint_of(other, last)
        return checkpoint_of(folder, lasting)

    def loaded(self) -> Path | None:
        """The folder of the checkpoint whose weights Megatron is going to load: to go on from, or to begin from."""
        if (folder := self.resumed()) is not None:
            return folder
        folders = [Path(folder) for folder in (self.args.load, self.args.pretrained_checkpoint) if folder is not None]
        return next((checkpoint for folder in folders if (checkpoint := newest(folder)) is not None), None)


def last_local(folder: Path) -> int | None:
    """The iteration of a rank's last local checkpoint, which Megatron names; None where there is none."""
    return max((int(path.name[5:12]) for path in folder.glob(f"iter_???????_{folder.name}_local.pt")), default=None)
