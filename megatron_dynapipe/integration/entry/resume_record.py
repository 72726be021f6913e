"""The record of its run that a checkpoint holds, compared when the checkpoint is resumed.

    CHECKPOINTS/iter_0000010/dynapipe.json                      beside Megatron's own files
    CHECKPOINTS/non_persistent/iter_0000012/dynapipe.json       where they are of the type `global`
    LOCAL/0/dynapipe.json                                       of the type `local`: beside rank 0's, for all of them

another vocabulary, weights    refused
another model                  refused, unless Megatron's --finetune says so: the weights would not mean the same
other data                     refused, unless --dynapipe-allow-other-data (or Megatron's --finetune) says so
another layout, split          fine, and named in one line; refused by local checkpoints, each rank's own part of it
another plan                   fine, and named in one line
another schedule               refused, unless one of Megatron's flags says which holds: the checkpoint's or the new one
another kind of optimizer      refused, unless Megatron's --no-load-optim or --finetune leaves its states out
"""

import logging
import threading
from collections.abc import Iterable, Mapping
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
from megatron_dynapipe.integration.entry.resumed_states import check_states
from megatron_dynapipe.integration.flags.model_record import GPT_TO_HYBRID, OF_WEIGHTS
from megatron_dynapipe.integration.flags.trackers import RELEASE, TRACKER
from megatron_dynapipe.outputs import replace_bytes
from megatron_dynapipe.service.settings import PlanInputs

if TYPE_CHECKING:  # it imports Megatron, which entry scripts must not before the CPU platform is in force
    from megatron_dynapipe.integration.flags.run_config import CheckpointConfig, RunConfig

logger = logging.getLogger(__name__)
NAME = "dynapipe.json"
VERSION: Final = "dynapipe-run/3"
_OF_A_START = (".first_iteration", ".first_sample", ".iterations", ".model_state_bytes")
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
_MOST_NAMED = 8


class ResumeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as far as a checkpoint of it depends on it; every value is text.

    Attributes:
        format: name and version of this form.
        model: what makes it this model, and its vocabulary's size.
        tokenizer: digest of its vocabulary.
        dataset: digest of each file.
        settings: what plans are made from, layout included, and how the model is trained, field by field.
        schedule: what learning rates and weight decay follow.
        optimizer: its kind.
        began: the iteration from which on batches are these settings', and the place in the samples where it began.
    """

    format: Literal["dynapipe-run/3"] = VERSION
    model: dict[str, str]
    tokenizer: str
    dataset: dict[str, str]
    settings: dict[str, str]
    schedule: dict[str, str]
    optimizer: str
    began: tuple[int, int]


def record_of(run: "RunConfig", inputs: PlanInputs) -> ResumeRecord:
    """The record of a run that is about to start; raises DataError where its dataset cannot be read."""
    meta = read_meta(run.data)
    model = {**run.checkpoints.model, "family": run.family.value, "vocabulary_size": str(meta.vocabulary_size)}
    training = {**run.checkpoints.training, "loss": str(run.loss_on or meta.loss)}
    splits = [split.name for split in inputs.splits]
    files = {name: file.quick for name, file in meta.files.items() if name.partition(".")[0] in splits}
    settings = {
        name: value
        for name, value in inputs.fields().items()
        if not name.startswith(_OF_MODEL) and not name.endswith(_OF_A_START)
    }
    return ResumeRecord(
        model=model,
        tokenizer=_tokenizer_digest(run.checkpoints.tokenizer),
        dataset=files or check_files(run.data, splits, {}),
        settings=settings | training,
        schedule=dict(run.checkpoints.schedule),
        optimizer=run.checkpoints.optimizer,
        began=(inputs.splits[0].first_iteration, inputs.splits[0].first_sample),
    )


def _tokenizer_digest(path: Path) -> str:
    """The digest of a tokenizer's vocabulary file; the settings beside it are written anew by every version."""
    if (path / "tokenizer.json").is_file():
        return digests.file_digest(path / "tokenizer.json")
    if path.is_dir():
        return folder_digest(path)
    return digests.file_digest(path) if path.is_file() else str(path)


class CheckpointRecords:
    """Puts a run's record into every checkpoint that the run saves to a folder; those of earlier runs are left alone.

    With `local` the folder is a rank's, of local checkpoints, which hold checksums of their own: it is put beside them.
    """

    def __init__(self, folder: Path, record: ResumeRecord, *, local: bool = False) -> None:
        self._folder = folder
        self._record = record
        self._is_local = local
        self._known = self._last_save()
        self._writing: threading.Thread | None = None

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
            return _last_local(self._folder)
        with suppress(OSError):
            return (self._folder / TRACKER).stat().st_mtime_ns
        return None


def _last_local(folder: Path) -> int | None:
    """The iteration of a rank's last local checkpoint, which Megatron names; None where there is none."""
    return max((int(path.name[5:12]) for path in folder.glob(f"iter_???????_{folder.name}_local.pt")), default=None)


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


def loaded(checkpoints: "CheckpointConfig") -> Path | None:
    """The folder of the checkpoint whose weights Megatron is going to load: to go on from, or to begin from."""
    if (folder := resumed(checkpoints)) is not None:
        return folder
    folders = [folder for folder in (checkpoints.load, checkpoints.pretrained) if folder is not None]
    return next((checkpoint for folder in folders if (checkpoint := newest(folder)) is not None), None)


def resumed(checkpoints: "CheckpointConfig") -> Path | None:
    """The folder of the checkpoint that Megatron is going to go on from; None if there is none."""
    folder = checkpoints.load
    step = checkpoints.step
    local = checkpoints.local_folder
    if folder is None:
        return None
    other = checkpoints.emergency_folder(folder)
    last = None if other is None else last_iteration(other)
    lasting = step or last_iteration(folder)
    if local is not None and (here := _last_local(local)) is not None and here >= (lasting or 0):
        return local
    if other is not None and last is not None and last >= (lasting or 0):
        return checkpoint_of(other, last)
    return checkpoint_of(folder, lasting)


def split_to_keep(checkpoints: "CheckpointConfig", layers: int, stages: int) -> LayerSplit | None:
    """The layers per stage in which the checkpoint to go on from has to be loaded; None where any will do.

    Raises:
        ConfigError: the checkpoint's record cannot be read.
    """
    folder = resumed(checkpoints)
    if not checkpoints.one_layout or folder is None or not folder.is_dir():
        return None
    even = even_layer_split(layers, stages)
    record = read_record(folder / NAME)
    with suppress(msgspec.DecodeError):  # "null": equal
        text = "" if record is None else record.settings.get("planner.layers_per_stage", "")
        saved = msgspec.json.decode(text, type=tuple[int | float, ...])
        fits = len(saved) == stages or (stages > 1 and len(saved) % stages == 0)  # that many, in as many chunks
        return saved if fits and sum(saved) == layers else even
    return even


def check_resumed(checkpoints: "CheckpointConfig", record: ResumeRecord) -> str | None:
    """Compare a run with the checkpoint that it resumes; what to tell the user, if anything.

    Raises:
        ConfigError: the checkpoint is of another model or vocabulary, of another layout than it can be loaded in, or
            its record cannot be read.
        DataError: it was trained on other data.
    """
    folder = resumed(checkpoints)
    if folder is None or not folder.is_dir():
        return None
    saved = read_record(folder / NAME)
    if saved is None:
        return f"{folder} does not say what it was trained on: its data, model and settings are not compared"
    model = _differences(saved.model, record.model, absent="Megatron's default")
    of_weights = set(OF_WEIGHTS)
    if "hybrid_layer_pattern" in record.model.keys() - saved.model.keys():
        of_weights -= GPT_TO_HYBRID  # Megatron compares the layers when it loads a GPT's
    refused = {name: text for name, text in model.items() if not checkpoints.finetunes or name in of_weights}
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
    if data and not checkpoints.allows_other_data:
        raise DataError(
            f"expected the data that the checkpoint {folder} was trained on, got {named(data.values())}",
            hint="give --dynapipe-data that dataset, or pass --dynapipe-allow-other-data to go on with this one",
        )
    check_states(checkpoints, folder, saved=saved, record=record)
    differences = model | data | _differences(saved.settings, record.settings)
    return f"resuming {folder} with other settings: {named(differences.values())}" if differences else None


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


def named(texts: Iterable[str]) -> str:
    """The first of many, and how many more there are."""
    first = list(texts)
    more = f", and {len(first) - _MOST_NAMED} more" if len(first) > _MOST_NAMED else ""
    return ", ".join(first[:_MOST_NAMED]) + more
