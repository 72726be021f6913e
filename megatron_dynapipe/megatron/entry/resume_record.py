"""The record of its run that a checkpoint holds, compared when the checkpoint is resumed.

    CHECKPOINTS/iter_0000010/dynapipe.json                      next to Megatron's own files
    CHECKPOINTS/non_persistent/iter_0000012/dynapipe.json       where they are of the type `global`
    LOCAL/0/dynapipe.json                                       of the type `local`: next to rank 0's, for all of them

another vocabulary, weights    refused
another model                  refused, unless Megatron's --finetune says so: the weights would not mean the same
other data                     refused, unless --dynapipe-allow-other-data (or Megatron's --finetune) says so
another layout, split          fine, and named in one line; refused by local checkpoints, each rank's own part of it
another plan                   fine, and named in one line
another schedule               as Megatron has it, which refuses one unless a flag says which holds
another kind of optimizer      refused, unless Megatron's --no-load-optim or --finetune leaves its states out
"""

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from megatron_dynapipe import digests
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.costing import LayerSplit, even_layer_split
from megatron_dynapipe.data.identity import check_files, folder_digest
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.megatron.flags.checkpoints import (
    TRACKER,
    Checkpoints,
    checkpoint_of,
    last_iteration,
    last_local,
)
from megatron_dynapipe.megatron.flags.model_record import GPT_TO_HYBRID, OF_WEIGHTS
from megatron_dynapipe.megatron.supply.same_flags import named
from megatron_dynapipe.outputs import replace_bytes
from megatron_dynapipe.service.corrections import Percents
from megatron_dynapipe.service.settings import PlanInputs

if TYPE_CHECKING:  # it imports Megatron, which entry scripts must not before the CPU platform is in force
    from megatron_dynapipe.megatron.flags.run_config import RunConfig

logger = logging.getLogger(__name__)
NAME = "dynapipe.json"
VERSION: Final = "dynapipe-run/4"
_OF_A_START = (".first_iteration", ".first_sample", ".iterations", ".model_state_bytes", ".corrections")
_OF_MODEL = "planner.model."
"""Settings of planners that repeat what `ResumeRecord.model` says."""
_LAYOUT = tuple(
    f"planner.{name}"
    for name in (
        *("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
        *("chunks", "layers_per_stage", "distributed_optimizer"),
    )
)
"""Settings by which every rank holds what it does."""


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as far as a checkpoint of it depends on it; every value is text.

    Attributes:
        format: name and version of this form.
        model: what makes it this model, and its vocabulary's size.
        tokenizer: digest of its vocabulary.
        dataset: digest of each file.
        settings: what plans are made from, layout included, and how the model is trained, field by field.
        began: the iteration from which on batches are these settings', and the place in the samples where it began.
        corrections: the latest of its costs (`PlannerSettings.corrections`).
    """

    format: Literal["dynapipe-run/4"] = VERSION
    model: dict[str, str]
    tokenizer: str
    dataset: dict[str, str]
    settings: dict[str, str]
    began: tuple[int, int]
    corrections: Percents = ()


def record_of(run: "RunConfig", inputs: PlanInputs) -> ResumeRecord:
    """The record of a run that is about to start; raises DataError where its dataset cannot be read."""
    meta = read_meta(run.data)
    model = {**run.checkpoints.model, "family": run.family.value, "vocabulary_size": str(meta.vocabulary_size)}
    training = {**run.checkpoints.training, "loss": str(run.sources.loss_on or meta.loss)}
    splits = [split.name for split in inputs.splits]
    files = {name: file.quick for name, file in meta.files.items() if name.partition(".")[0] in splits}
    settings = {
        name: value
        for name, value in inputs.fields().items()
        if not name.startswith(_OF_MODEL) and not name.endswith(_OF_A_START)
    }
    return ResumeRecord(
        model=model,
        tokenizer=_tokenizer_digest(Path(str(run.args.tokenizer_model))),
        dataset=files or check_files(run.data, splits, {}),
        settings=settings | training,
        began=(inputs.splits[0].first_iteration, inputs.splits[0].first_sample),
        corrections=inputs.planner.corrections,
    )


def _tokenizer_digest(path: Path) -> str:
    """The digest of a tokenizer's vocabulary file; the settings next to it are written anew by every version."""
    if (path / "tokenizer.json").is_file():
        return digests.file_digest(path / "tokenizer.json")
    if path.is_dir():
        return folder_digest(path)
    return digests.file_digest(path) if path.is_file() else str(path)


class CheckpointRecords:
    """Puts a run's record into every checkpoint that the run saves to a folder; earlier runs' are left alone.

    With `local` the folder is a rank's, of local checkpoints, which hold their own checksums: it is put next to them.
    """

    def __init__(self, folder: Path, record: ResumeRecord, *, local: bool = False) -> None:
        self._folder = folder
        self._record = record
        self._is_local = local
        self._known = self._last_save()
        self._writing: threading.Thread | None = None

    def correct(self, corrections: Percents) -> None:
        """Checkpoints from now on hold these."""
        self._record = msgspec.structs.replace(self._record, corrections=corrections)

    def finish(self) -> None:
        """Wait for digests that are being written: no thread can do it once the interpreter ends."""
        if self._writing is not None:
            self._writing.join()

    def update(self) -> None:
        """Write the record if a checkpoint has been completed since the last call; raises OSError."""
        last = self._last_save()
        if last == self._known:
            return
        self._known = last
        folder = self._folder if self._is_local else checkpoint_of(self._folder, last_iteration(self._folder))
        if folder is None or not folder.is_dir():
            return
        replace_bytes(folder / NAME, msgspec.json.format(msgspec.json.encode(self._record), indent=1) + b"\n")
        if not self._is_local:
            (folder / digests.NAME).unlink(missing_ok=True)  # of a checkpoint that this one has replaced
            self.finish()
            self._writing = threading.Thread(target=_write_digests, args=(folder,))
            self._writing.start()

    def _last_save(self) -> int | None:
        """The time, or the iteration, of Megatron's last complete checkpoint; None if there is none."""
        if self._is_local:
            return last_local(self._folder)
        with suppress(OSError):
            return (self._folder / TRACKER).stat().st_mtime_ns
        return None


def _write_digests(folder: Path) -> None:
    try:
        digests.write_digests(folder)
    except OSError as error:
        logger.warning("no digests of the checkpoint %s, which is not compared when it is loaded: %s", folder, error)


def checkpoint_records(run: "RunConfig", inputs: PlanInputs) -> list[CheckpointRecords]:
    """The records of the checkpoints that a run saves, lasting and not; empty where it saves none."""
    saved = run.checkpoints.save
    local = run.checkpoints.local_folder
    if saved is None:
        return []
    record = record_of(run, inputs)
    emergency = run.checkpoints.emergency_folder(saved)
    lasting = [CheckpointRecords(folder, record) for folder in (saved, emergency) if folder is not None]
    return [*lasting, *([] if local is None else [CheckpointRecords(local, record, local=True)])]


def split_to_keep(checkpoints: Checkpoints, layers: int, stages: int) -> LayerSplit | None:
    """The layers per stage in which the checkpoint to go on from has to be loaded; None where any will do.

    Raises:
        ConfigError: the checkpoint's record cannot be read.
    """
    folder = checkpoints.resumed()
    if not checkpoints.load_in_one_layout or folder is None or not folder.is_dir():
        return None
    even = even_layer_split(layers, stages)
    record = read_record(folder / NAME)
    with suppress(msgspec.DecodeError):  # "null": equal
        text = "" if record is None else record.settings.get("planner.layers_per_stage", "")
        saved = msgspec.json.decode(text, type=tuple[int | float, ...])
        fits = len(saved) == stages or (stages > 1 and len(saved) % stages == 0)  # that many, in as many chunks
        return saved if fits and sum(saved) == layers else even
    return even


def check_resumed(checkpoints: Checkpoints, record: ResumeRecord) -> str | None:
    """Compare a run with the checkpoint that it resumes; what to tell the user, if anything.

    Raises:
        ConfigError: the checkpoint is of another model or vocabulary, of another layout than it can be loaded in, or
            its record cannot be read.
        DataError: it was trained on other data.
    """
    folder = checkpoints.resumed()
    if folder is None or not folder.is_dir():
        return None
    saved = read_record(folder / NAME)
    if saved is None:
        return f"{folder} does not say what it was trained on: its data, model and settings are not compared"
    model = _differences(saved.model, record.model, absent="Megatron's default")
    of_weights = set(OF_WEIGHTS)
    if "hybrid_layer_pattern" in record.model.keys() - saved.model.keys():
        of_weights -= GPT_TO_HYBRID  # Megatron compares the layers when it loads a GPT's
    refused = {name: text for name, text in model.items() if not checkpoints.args.finetune or name in of_weights}
    refused |= _differences({"tokenizer": saved.tokenizer}, {"tokenizer": record.tokenizer})
    if refused:
        raise ConfigError(
            f"expected the model and vocabulary of the checkpoint {folder}, got {named(refused.values())}",
            hint="resume with the flags and the tokenizer that it was trained with, or leave --load out; --finetune"
            " takes another model of the same weights",
        )
    layouts = ({name: compared.settings.get(name, "absent") for name in _LAYOUT} for compared in (saved, record))
    if folder == checkpoints.local_folder and (differences := _differences(*layouts)):
        raise ConfigError(
            f"expected the layout of the local checkpoint {folder}, which every rank loads its own part of, got"
            f" {named(differences.values())}",
            hint="resume in the layout that saved it, or delete it to go on from an earlier checkpoint;"
            " --non-persistent-ckpt-type global saves checkpoints that load in any layout",
        )
    shared = saved.dataset.keys() & record.dataset.keys()  # evaluations may have been turned on or off
    data = _differences(*({name: files[name] for name in shared} for files in (saved.dataset, record.dataset)))
    if data and not (checkpoints.args.dynapipe_allow_other_data or checkpoints.args.finetune):
        raise DataError(
            f"expected the data that the checkpoint {folder} was trained on, got {named(data.values())}",
            hint="give --dynapipe-data that dataset, or pass --dynapipe-allow-other-data to go on with this one",
        )
    if checkpoints.loads_optimizer:
        _check_optimizer(folder, saved.settings, record.settings)
    differences = model | data | _differences(saved.settings, record.settings)
    return f"resuming {folder} with other settings: {named(differences.values())}" if differences else None


def _check_optimizer(folder: Path, saved: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Refuse an optimizer whose states the checkpoint has not: Megatron would end with a traceback among their names.

    One of half precision has parameters of its own next to the model's.
    """
    kinds = []
    for each in (saved, settings):
        half = "True" in (each.get("bf16"), each.get("fp16"))
        kinds.append(
            {
                "--use-distributed-optimizer": each.get("planner.distributed_optimizer", "false"),
                "--optimizer": each.get("optimizer", "adam"),
                "parameters": "of half precision" if half else "in fp32",
            }
        )
    if differences := _differences(*kinds):
        raise ConfigError(
            f"expected the optimizer whose states {folder} holds, got {named(differences.values())}",
            hint="resume with the flags that it was trained with; --no-load-optim resumes the weights alone: the"
            " optimizer starts with empty states",
        )


def read_record(path: Path) -> ResumeRecord | None:
    """A checkpoint's record; None where it has none; raises ConfigError where it cannot be read."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(read_bounded(path, most_bytes=10_000_000), type=ResumeRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read what the checkpoint says of its run, {path}: {error}",
            hint="delete this file to resume without a comparison",
        ) from error


def _differences(saved: Mapping[str, str], current: Mapping[str, str], *, absent: str = "absent") -> dict[str, str]:
    """Fields in which two records differ, by name, and how; one that only one of them has differs, too."""
    return {
        name: f"{name} {current.get(name, absent)} (was {saved.get(name, absent)})"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    }
