"""What a checkpoint says of its run, and what a run that resumes it is told."""

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.megatron.entry.resume_record import (
    NAME,
    CheckpointRecords,
    ResumeRecord,
    check_resumed,
)
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER, Checkpoints

RECORD = ResumeRecord(
    model={"hidden_size": "32", "vocabulary_size": "4096", "rotary_base": "10000"},
    tokenizer="t",
    dataset={"train.bin": "d"},
    settings={"planner.pipeline_parallel": "2", "planner.layers_per_stage": "null"},
    began=(0, 0),
)
replace = msgspec.structs.replace


def save(checkpoints: Path, iteration: int) -> Path:
    """What Megatron leaves, in its order."""
    folder = checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (checkpoints / TRACKER).write_text(str(iteration))
    return folder


def config(checkpoints: Path, *, local_folder: Path | None = None, **changes: object) -> Checkpoints:
    """Of a run with Megatron's defaults; `local_folder` is rank 0's, of local checkpoints."""
    chosen = {
        "save": None, "load": checkpoints, "ckpt_step": None, "non_persistent_ckpt_type": None, "rank": 0,
        "non_persistent_global_ckpt_dir": None, "dynapipe_allow_other_data": False, "finetune": False,
        "pretrained_checkpoint": None, "ckpt_format": "torch_dist", "use_distributed_optimizer": False,
        "no_load_optim": False, "optimizer": "adam",
    }  # fmt: skip
    if local_folder is not None:
        chosen |= {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": local_folder.parent}
    return Checkpoints(argparse.Namespace(**(chosen | changes)), None)  # type: ignore[arg-type]


def resume(checkpoints: Path, record: ResumeRecord, **changes: object) -> str | None:
    return check_resumed(config(checkpoints, **changes), record)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Saved once, by `RECORD`."""
    records = CheckpointRecords(tmp_path, RECORD)
    save(tmp_path, 3)
    records.update()
    return tmp_path


def test_each_checkpoint_that_a_run_saves_holds_its_record(checkpoints: Path) -> None:
    assert (checkpoints / "iter_0000003" / NAME).exists()
    assert resume(checkpoints, RECORD) is None


def test_checkpoints_of_earlier_runs_are_left_as_they_are(tmp_path: Path) -> None:
    old = save(tmp_path, 3)
    records = CheckpointRecords(tmp_path, RECORD)
    records.update()
    assert not (old / NAME).exists()
    new = save(tmp_path, 6)
    records.update()
    assert (new / NAME).exists() and not (old / NAME).exists()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"model": RECORD.model | {"hidden_size": "64"}}, "hidden_size 64 (was 32)"),
        ({"model": RECORD.model | {"vocabulary_size": "2048"}}, "vocabulary_size 2048 (was 4096)"),
        ({"tokenizer": "other"}, "tokenizer other (was t)"),
    ],
)
@pytest.mark.parametrize("flags", [{}, {"dynapipe_allow_other_data": True}, {"finetune": True}])
def test_another_model_or_vocabulary_is_refused(checkpoints, changes, difference, flags):
    message = f"expected the model and vocabulary of the checkpoint .*got {re.escape(difference)}"
    with pytest.raises(ConfigError, match=message):
        resume(checkpoints, replace(RECORD, **changes), **flags)


@pytest.mark.parametrize("model", [{"rotary_base": "500000"}, {"layernorm_epsilon": "0.001"}])
def test_another_model_of_the_same_weights_is_taken_to_finetune_alone(checkpoints: Path, model: dict) -> None:
    other = replace(RECORD, model=RECORD.model | model)
    ((name, value),) = model.items()
    with pytest.raises(ConfigError, match=rf"got {name} {value} \(was") as caught:
        resume(checkpoints, other)
    assert "--finetune" in str(caught.value.hint)
    assert f"with other settings: {name} {value} (was" in str(resume(checkpoints, other, finetune=True))


def test_other_data_needs_a_flag_that_says_so(checkpoints: Path) -> None:
    other = replace(RECORD, dataset={"train.bin": "e"})
    with pytest.raises(DataError, match=r"got train.bin e \(was d\)") as caught:
        resume(checkpoints, other)
    assert "--dynapipe-allow-other-data" in str(caught.value.hint)
    assert "train.bin e (was d)" in str(resume(checkpoints, other, dynapipe_allow_other_data=True))
    assert resume(checkpoints, replace(RECORD, dataset=RECORD.dataset | {"valid.bin": "v"})) is None, "now evaluated"


def test_a_record_of_another_version_is_refused_by_its_name(checkpoints: Path) -> None:
    file = checkpoints / "iter_0000003" / NAME
    file.write_bytes(file.read_bytes().replace(b"dynapipe-run/4", b"dynapipe-run/9"))
    with pytest.raises(ConfigError, match="'dynapipe-run/9'") as caught:
        resume(checkpoints, RECORD)
    assert "delete this file to resume without a comparison" in str(caught.value.hint)


def test_other_settings_are_named_in_one_line(checkpoints: Path) -> None:
    settings = {"planner.pipeline_parallel": "1", "planner.layers_per_stage": "null"}
    said = resume(checkpoints, replace(RECORD, settings=settings))
    assert said == f"resuming {checkpoints}/iter_0000003 with other settings: planner.pipeline_parallel 1 (was 2)"
    many = {f"name {number}": "1" for number in range(20)}
    assert "and 14 more" in str(resume(checkpoints, replace(RECORD, settings=many)))


STATES = {"planner.distributed_optimizer": "true", "bf16": "False", "fp16": "False", "optimizer": "adam"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"planner.distributed_optimizer": "false"}, "got --use-distributed-optimizer false (was true)"),
        ({"optimizer": "sgd"}, "got --optimizer sgd (was adam)"),
        ({"bf16": "True"}, "got parameters of half precision (was in fp32)"),
    ],
)
def test_states_that_megatron_would_not_take_are_refused_with_the_flag_to_give(checkpoints, changes, said) -> None:
    before = replace(RECORD, settings=RECORD.settings | STATES)
    records = CheckpointRecords(checkpoints, before)
    save(checkpoints, 6)
    records.update()
    assert resume(checkpoints, before) is None
    other = replace(before, settings=before.settings | changes)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        resume(checkpoints, other)
    assert "--no-load-optim resumes the weights alone" in str(caught.value.hint)
    assert "with other settings" in str(resume(checkpoints, other, no_load_optim=True))
