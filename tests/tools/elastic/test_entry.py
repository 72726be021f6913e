"""What a rank makes of its command line with `--dynapipe-elastic`, and of the checkpoints that it finds."""

import argparse
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.errors import CheckpointError, ConfigError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CPU_RATES, ModelShape
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs, SplitSettings
from megatron_dynapipe.tools import elastic
from megatron_dynapipe.tools.elastic import ElasticLayout
from megatron_dynapipe.tools.tuning import Space, tune
from tests.core.planner_cases import batch, cost_model
from tests.helpers.processes import run_ranks
from tests.helpers.samples import write_samples
from tests.helpers.settings import settings_in_layers

GPT = ModelFamily.GPT
GLOBAL = {"non_persistent_save_interval": 50, "non_persistent_ckpt_type": "global"}


def flags(folder: Path, **changes: object) -> argparse.Namespace:
    """Parsed flags of an elastic run that saves to `folder`, as far as they are looked at."""
    values = {
        "save": str(folder),
        "save_interval": 100,
        "load": "elsewhere",
        "finetune": False,
        "ckpt_format": "torch_dist",
        "context_parallel_size": 1,
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
        "exit_signal_handler": False,
        "non_persistent_global_ckpt_dir": None,
        "dynapipe_elastic": True,
        "hybrid_layer_pattern": None,
        **dict.fromkeys(GLOBAL),
        **elastic.LAYOUT,
    }
    return argparse.Namespace(**(values | changes))


def test_a_layout_given_by_hand_is_dropped_and_said(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    args = flags(tmp_path, pipeline_model_parallel_size=2, dynapipe_layers_per_stage=(3, 1))
    elastic.make_resumable(args)
    assert elastic.LAYOUT.items() <= vars(args).items()
    said = capsys.readouterr().out
    assert "chooses the layout: --pipeline-model-parallel-size, --dynapipe-layers-per-stage\n" in said
    elastic.make_resumable(flags(tmp_path))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("folder", ["", "non_persistent"])
def test_a_job_resumes_what_it_has_saved_whatever_it_began_from(tmp_path: Path, folder: str) -> None:
    elastic.make_resumable(fresh := flags(tmp_path))
    assert fresh.load == "elsewhere"
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / TRACKER).write_text("20")
    elastic.make_resumable(again := flags(tmp_path))
    assert again.load == str(tmp_path)
    with pytest.raises(ConfigError, match="--finetune would begin from them anew"):
        elastic.make_resumable(flags(tmp_path, finetune=True))


def save_args(folder: Path, iteration: int) -> argparse.Namespace:
    """Megatron's arguments after an iteration of a run that saves emergency checkpoints every five, others every 50."""
    every = {"save_interval": 50, "non_persistent_save_interval": 5, "non_persistent_ckpt_type": "global"}
    place = {"save": str(folder), "non_persistent_global_ckpt_dir": None}
    return argparse.Namespace(rank=0, curr_iteration=iteration - 1, **place, **every)


KEPT = {"iter_0000010", "iter_0000020", "iter_0000025", "iter_0000050", "other"}


@pytest.mark.parametrize(
    ("tracker", "iteration", "deleted"),
    [
        pytest.param(b"20", 25, {"iter_0000025"}, id="killed while it saved"),
        pytest.param(b"25", 25, set(), id="complete"),
        pytest.param(b"25", 10, set(), id="an earlier one, of a tracker that was set back"),
        pytest.param(b"20", 26, set(), id="none is due"),
        pytest.param(b"20", 50, set(), id="the one that lasts is due"),
        pytest.param(b"20", None, set(), id="saved by another program"),
        pytest.param(b"", 25, set(), id="an empty tracker"),
        pytest.param(b"\xef\xbb\xbf20", 25, set(), id="a byte order mark"),
        pytest.param(None, 25, set(), id="no tracker"),
    ],
)
def test_an_emergency_checkpoint_that_was_not_completed_is_deleted_and_no_other(
    tmp_path: Path, tracker: bytes | None, iteration: int | None, deleted: set[str]
) -> None:
    """All above the tracker's were, and all of them where it could not be read."""
    folder = tmp_path / "non_persistent"
    for name in KEPT:
        (folder / name).mkdir(parents=True)
    if tracker is not None:
        (folder / TRACKER).write_bytes(tracker)
    if iteration is not None:
        elastic.note_save(save_args(tmp_path, iteration))
    elastic.delete_unfinished(folder)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == KEPT - deleted
    elastic.delete_unfinished(tmp_path / "absent")


def test_a_folder_of_emergency_checkpoints_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "non_persistent").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*non_persistent: File exists"):
        elastic.note_save(save_args(tmp_path, 25))


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, GLOBAL | {"dist_ckpt_optim_fully_reshardable": False}),
        ({"non_persistent_save_interval": 7}, {"non_persistent_save_interval": 7, "non_persistent_ckpt_type": None}),
        ({"use_distributed_optimizer": True}, GLOBAL | {"dist_ckpt_optim_fully_reshardable": True}),
    ],
)
def test_checkpoints_can_be_loaded_in_every_layout(tmp_path: Path, given, settled) -> None:
    elastic.make_resumable(args := flags(tmp_path, **given))
    assert (settled | {"exit_signal_handler": True}).items() <= vars(args).items()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save": None}, "expected --save DIR with --dynapipe-elastic, got none"),
        ({"save_interval": None}, "expected --save-interval N with --save, got none"),
        ({"ckpt_format": "torch"}, "expected --ckpt-format torch_dist with --dynapipe-elastic, got torch"),
        ({"context_parallel_size": 2}, "--dynapipe-elastic knows no layouts with context parallelism"),
    ],
)
def test_what_cannot_be_resharded_is_refused(tmp_path: Path, given, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        elastic.make_resumable(flags(tmp_path, **given))


def test_nothing_happens_without_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt_multitask.py", "--pipeline-model-parallel-size", "2"])
    ran = []
    elastic.adapting(lambda: ran.append("main"))()
    args = flags(tmp_path, dynapipe_elastic=False, save=None, pipeline_model_parallel_size=2)
    before = dict(vars(args))
    elastic.fit_layout(args, GPT, [])
    assert ran == ["main"] and vars(args) == before


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load": None, "save": None}, "a start after a failure begins anew; --save FOLDER --load FOLDER has it go on"),
        ({"load": "a", "save": "b"}, "anew; --save b --load b --pretrained-checkpoint a has it go on"),
        ({"load": "b", "save": "b"}, ""),
    ],
)
def test_starts_that_torchrun_repeats_share_a_store_of_their_own_and_say_what_they_begin_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: dict, said: str
) -> None:
    waited = []
    monkeypatch.setattr("sys.argv", ["pretrain_gpt_multitask.py", "--dynapipe-timeout-s", "40"])
    monkeypatch.setattr(elastic, "renew", waited.append)
    for restarts, expected in (("0", ""), ("3", said)):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        elastic.adapting(lambda: elastic.fit_layout(flags(tmp_path, dynapipe_elastic=False, **given), GPT, []))()
        out = capsys.readouterr().out
        assert expected in out
        assert bool(out) == bool(expected)
    assert waited == [40]


def test_a_rank_that_had_a_notice_ends_with_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def leave(code: int) -> object:
        with pytest.raises(SystemExit) as leaving, elastic.status():
            raise SystemExit(code)
        return leaving.value.code

    assert leave(0) == 0, "--exit-interval and --exit-duration-in-mins end the job"
    monkeypatch.setattr(elastic, "_has_notice", True)
    assert leave(0) == 75
    assert leave(1) == 1


def saved_through_a_signal(rank: int, world_size: int) -> str:
    """What a writer's queue gives back after SIGTERM to the processes that this rank has started."""
    import multiprocessing
    import os

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    elastic._take_notices()
    queue = filesystem_async.get_write_results_queue()
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGTERM)
    queue.put("written")
    written: str = queue.get(timeout=30)
    for child in multiprocessing.active_children():
        child.kill()
    return written


def test_torchrun_s_signal_to_a_group_does_not_end_what_saves() -> None:
    """The checkpoint on notice failed with a broken pipe."""
    assert run_ranks(saved_through_a_signal, 1) == ["written"]


BASE = settings_in_layers(
    GPT,
    4,
    hidden_size=128,
    memory_limit_bytes=2 * 10**9,
    schedule=ScheduleSettings(search_evaluations=10),
)


def best(ranks: int, memory_limit_bytes: int = 2 * 10**9) -> ElasticLayout:
    space = Space(devices=ranks, distributed_optimizer=False, tensor_sizes=(1,), global_batch_size=12)
    base = msgspec.structs.replace(BASE, memory_limit_bytes=memory_limit_bytes)
    found = tune(base, cost_model(GPT), [batch(GPT, 12)], space, top=1).layouts[0]
    return msgspec.json.decode(msgspec.json.encode(found), type=ElasticLayout)


def run_inputs(folder: Path, memory_limit_bytes: int = 2 * 10**9) -> PlanInputs:
    """Of a run of one rank over samples of different lengths."""
    lengths = np.random.default_rng(5).integers(1, 120, 200).tolist()
    write_samples(folder / "train", [[[0] * length, [0]] for length in lengths], 512)
    sampler = SamplerSettings(family=GPT, seed=1, samples_per_iteration=12, max_input_length=128, max_target_length=128)
    shape = ModelShape(family=GPT, hidden=128, heads=4, kv_channels=32, ffn=512, vocabulary=512)
    return PlanInputs(
        data_folder=str(folder),
        splits=(SplitSettings(name="train", sampler=sampler),),
        planner=msgspec.structs.replace(BASE, memory_limit_bytes=memory_limit_bytes),
        costs=AnalyticCosts(shape=shape, rates=CPU_RATES, max_size=16, max_length=256),
    )


def test_a_layout_is_chosen_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The one that a search in this process finds for the run's first batches."""
    inputs = run_inputs(tmp_path)
    space = {"devices": 4, "tensor_sizes": (1,), "distributed_optimizer": False, "global_batch_size": 12}
    sampler = split_sampler(tmp_path, inputs.splits[0])
    batches = [sampler.batch(at) for at in range(elastic.BATCHES)]
    expected = tune(inputs.planner, inputs.costs.load(), batches, msgspec.convert(space, Space), top=1).layouts[0]
    found = elastic.tuned(inputs, space, deadline_s=60)
    assert found.predicted_ms is not None
    assert {name: getattr(expected, name) for name in found.__struct_fields__} == msgspec.structs.asdict(found)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        pytest.param({"deadline_s": 0.1}, "no layout of 1 ranks could be chosen: not in 0 s", None, id="deadline"),
        pytest.param(
            {"data": True}, "no layout of 1 ranks could be chosen: expected .*a dataset", "prepare", id="data"
        ),
    ],
)
def test_why_that_process_could_not_choose_is_told(tmp_path: Path, given, message: str, hint: str | None) -> None:
    inputs = run_inputs(tmp_path)
    if given.pop("data", False):
        inputs = msgspec.structs.replace(inputs, data_folder=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=message) as refused:
        elastic.tuned(inputs, {"devices": 1}, **({"deadline_s": 60} | given))
    assert (hint or "") in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("ranks", "limit", "message"),
    [
        pytest.param(5, 2 * 10**9, "no layout of 5 ranks fits: ", id="neither divide the batch nor the layers"),
        pytest.param(2, 10**5, "no layout of 2 ranks fits: ", id="memory"),
    ],
)
def test_what_no_layout_fits_is_an_error(monkeypatch: pytest.MonkeyPatch, ranks: int, limit: int, message: str) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError, match=message):
        elastic.agreed_layout(lambda ranks: best(ranks, limit), timeout_s=60)


def test_a_layout_is_given_to_parsed_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = best(1)
    for layout in (one, msgspec.structs.replace(one, pipeline_parallel=3, layers_per_stage=(2, 1, 1))):
        monkeypatch.setattr(elastic, "agreed_layout", lambda *_, layout=layout, **__: layout)
        elastic.fit_layout(args := flags(tmp_path, dynapipe_timeout_s=60.0), GPT, [])
        split = "equal" if layout is one else (2, 1, 1)
        assert (args.tensor_model_parallel_size, args.dynapipe_layers_per_stage) == (1, split)
        assert args.pipeline_model_parallel_size == layout.pipeline_parallel
