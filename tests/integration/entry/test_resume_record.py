"""What a checkpoint says of its run, and what a run that resumes it is told."""

import re
from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.integration.entry.resume_record import (
    NAME,
    CheckpointRecords,
    ResumeRecord,
    check_resumed,
    loaded,
    split_to_keep,
)
from megatron_dynapipe.integration.flags.run_config import CheckpointConfig
from megatron_dynapipe.integration.flags.trackers import TRACKER

RECORD = ResumeRecord(
    model={"hidden_size": "32", "vocabulary_size": "4096", "rotary_base": "10000"},
    tokenizer="t",
    dataset={"train.bin": "d"},
    settings={"planner.pipeline_parallel": "2", "planner.layers_per_stage": "null"},
    schedule={},
    optimizer="adam",
    began=(0, 0),
)
replace = msgspec.structs.replace


def save(checkpoints: Path, iteration: int) -> Path:
    """What Megatron leaves, in its order."""
    folder = checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (checkpoints / TRACKER).write_text(str(iteration))
    return folder


def config(checkpoints: Path, **changes: object) -> CheckpointConfig:
    chosen = {
        "save": None, "load": checkpoints, "step": None, "non_persistent": False, "non_persistent_folder": None,
        "allows_other_data": False, "finetunes": False, "model": {}, "training": {}, "tokenizer": checkpoints,
        "local_folder": None, "pretrained": None, "one_layout": False, "schedule": {}, "keeps_schedule": True,
        "loads_optimizer": True, "optimizer": "adam",
    }  # fmt: skip
    return CheckpointConfig(**(chosen | changes))


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
@pytest.mark.parametrize("flags", [{}, {"allows_other_data": True}, {"finetunes": True}])
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
    assert f"with other settings: {name} {value} (was" in str(resume(checkpoints, other, finetunes=True))


def test_other_data_needs_a_flag_that_says_so(checkpoints: Path) -> None:
    other = replace(RECORD, dataset={"train.bin": "e"})
    with pytest.raises(DataError, match=r"got train.bin e \(was d\)") as caught:
        resume(checkpoints, other)
    assert "--dynapipe-allow-other-data" in str(caught.value.hint)
    assert "train.bin e (was d)" in str(resume(checkpoints, other, allows_other_data=True))
    assert resume(checkpoints, replace(RECORD, dataset=RECORD.dataset | {"valid.bin": "v"})) is None, "now evaluated"


def test_a_record_of_another_version_is_refused_by_its_name(checkpoints: Path) -> None:
    file = checkpoints / "iter_0000003" / NAME
    file.write_bytes(file.read_bytes().replace(b"dynapipe-run/3", b"dynapipe-run/9"))
    with pytest.raises(ConfigError, match="'dynapipe-run/9'") as caught:
        resume(checkpoints, RECORD)
    assert "delete this file to resume without a comparison" in str(caught.value.hint)


def test_other_settings_are_named_in_one_line(checkpoints: Path) -> None:
    settings = {"planner.pipeline_parallel": "1", "planner.layers_per_stage": "null"}
    said = resume(checkpoints, replace(RECORD, settings=settings))
    assert said == f"resuming {checkpoints}/iter_0000003 with other settings: planner.pipeline_parallel 1 (was 2)"
    many = {f"name {number}": "1" for number in range(20)}
    assert "and 14 more" in str(resume(checkpoints, replace(RECORD, settings=many)))


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        (
            {"settings": RECORD.settings | {"planner.distributed_optimizer": "false"}},
            "expected --use-distributed-optimizer, as in the run that saved",
            "add --use-distributed-optimizer; --no-load-optim",
        ),
        ({"optimizer": "sgd"}, "holds, adam, got sgd", "--no-load-optim resumes the weights alone"),
        (
            {"settings": RECORD.settings | {"planner.distributed_optimizer": "true", "bf16": "True", "fp16": "False"}},
            "holds, in fp32, got of half precision",
            "--no-load-optim resumes the weights alone",
        ),
        ({"schedule": {"learning rate": "0.1"}}, "learning rate, 0.001, got 0.1", "--override-opt-param-scheduler"),
    ],
)
def test_states_that_megatron_would_not_take_are_refused_with_the_flag_to_give(checkpoints, changes, said, hint):
    settings = RECORD.settings | {"planner.distributed_optimizer": "true", "bf16": "False", "fp16": "False"}
    before = replace(RECORD, settings=settings, schedule={"learning rate": "0.001"}, optimizer="adam")
    records = CheckpointRecords(checkpoints, before)
    save(checkpoints, 6)
    records.update()
    assert resume(checkpoints, before) is None
    other = replace(before, **changes)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        resume(checkpoints, other)
    assert hint in str(caught.value.hint)
    resume(checkpoints, other, loads_optimizer=False, keeps_schedule=False)


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    assert resume(tmp_path, RECORD) is None
    save(tmp_path, 3)
    assert "does not say what it was trained on" in str(resume(tmp_path, RECORD))
    (tmp_path / TRACKER).write_text("release")
    assert resume(tmp_path, RECORD) is None


GLOBAL = {"non_persistent": True}
OTHER = replace(RECORD, tokenizer="other")


@pytest.mark.parametrize(("iteration", "flags", "refused"), [(5, GLOBAL, True), (2, GLOBAL, False), (5, {}, False)])
def test_the_emergency_checkpoint_is_compared_where_megatron_loads_it(checkpoints, iteration, flags, refused):
    records = CheckpointRecords(checkpoints / "non_persistent", OTHER)
    save(checkpoints / "non_persistent", iteration)
    records.update()
    if not refused:
        assert resume(checkpoints, RECORD, **flags) is None
        return
    assert resume(checkpoints, OTHER, **flags) is None
    with pytest.raises(ConfigError, match=r"model and vocabulary of the checkpoint .*iter_0000005"):
        resume(checkpoints, RECORD, **flags)
    elsewhere = checkpoints / "elsewhere"
    assert resume(checkpoints, RECORD, non_persistent=True, non_persistent_folder=elsewhere) is None


def test_a_local_checkpoint_resumes_in_its_own_layout_alone(checkpoints: Path) -> None:
    """Every rank loads its own part, whatever layers it now has: Megatron would end among keys that do not match."""
    local, halves = checkpoints / "local" / "0", {"planner.layers_per_stage": "[2.5,1.5]"}
    local.mkdir(parents=True)
    saved = replace(RECORD, settings=RECORD.settings | halves)
    records = CheckpointRecords(local, saved, local=True)
    (local / "iter_0000005_1_local.pt").touch()  # kept for another rank
    records.update()
    assert resume(checkpoints, RECORD, local_folder=local) is None, "Megatron loads the lasting one"
    (local / "iter_0000005_0_local.pt").touch()
    records.update()
    assert resume(checkpoints, saved, local_folder=local) is None
    assert split_to_keep(config(checkpoints, local_folder=local, one_layout=True), 4, 2) == (2.5, 1.5)
    with pytest.raises(ConfigError, match=r"local checkpoint .*local/0.*layers_per_stage null \(was \[2.5,1.5\]\)"):
        resume(checkpoints, RECORD, local_folder=local)
    assert resume(checkpoints, RECORD) is None and resume(checkpoints, RECORD, local_folder=local, step=6) is None


def test_a_planned_split_is_that_of_a_checkpoint_which_loads_in_no_other(checkpoints: Path) -> None:
    fixed = config(checkpoints, one_layout=True)
    assert split_to_keep(fixed, 4, 2) == (2, 2), "equal, as its record has no numbers"
    records = CheckpointRecords(checkpoints, replace(RECORD, settings={"planner.layers_per_stage": "[2.5,1.5]"}))
    save(checkpoints, 6)
    records.update()
    assert split_to_keep(fixed, 4, 2) == (2.5, 1.5)
    chunked = CheckpointRecords(checkpoints, replace(RECORD, settings={"planner.layers_per_stage": "[1,1,1,1]"}))
    save(checkpoints, 7)
    chunked.update()
    assert split_to_keep(fixed, 4, 2) == (1, 1, 1, 1) and split_to_keep(fixed, 4, 3) == (2, 1, 1)
    records = CheckpointRecords(checkpoints, replace(RECORD, settings={"planner.layers_per_stage": "[2.5,1.5]"}))
    save(checkpoints, 8)
    records.update()
    assert split_to_keep(fixed, 4, 1) == (4,) and split_to_keep(fixed, 6, 2) == (3, 3), "it cannot be loaded"
    assert split_to_keep(config(checkpoints), 4, 2) is None
    save(checkpoints, 9)
    assert split_to_keep(fixed, 4, 2) == (2, 2), "of a run without a record"
    assert split_to_keep(config(checkpoints / "none", one_layout=True), 4, 2) is None


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[" * 100_000])
def test_a_damaged_record_is_one_error(checkpoints: Path, content: bytes) -> None:
    (checkpoints / "iter_0000003" / NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read what the checkpoint says of its run"):
        resume(checkpoints, RECORD)


@pytest.mark.parametrize(
    ("trackers", "flags", "expected"),
    [
        ({}, {}, None),
        ({"load": "7"}, {}, "load/iter_0000007"),
        ({"load": "7"}, {"step": 5}, "load/iter_0000005"),
        ({"load": "release"}, {}, "load/release"),
        ({"pretrained": "release"}, {}, "pretrained/release"),
        ({"pretrained": "30"}, {}, "pretrained/iter_0000030"),
        ({"load": "7", "pretrained": "30"}, {}, "load/iter_0000007"),
        ({"load/non_persistent": "9", "pretrained": "30"}, GLOBAL, "load/non_persistent/iter_0000009"),
        ({"load": "?"}, {}, None),
    ],
    ids=str,
)
def test_the_checkpoint_whose_files_are_compared_is_the_one_that_megatron_loads(tmp_path, trackers, flags, expected):
    for name, text in trackers.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / TRACKER).write_text(text)
    folder = loaded(config(tmp_path / "load", pretrained=tmp_path / "pretrained", **flags))
    assert folder == (None if expected is None else tmp_path / expected)
