"""Megatron's checkpoints of a run, by its arguments: where they lie, and which one training goes on from."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.integration.flags.model_record import model_fields, training_fields
from megatron_dynapipe.integration.flags.trackers import checkpoint_of, last_iteration, newest

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


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
