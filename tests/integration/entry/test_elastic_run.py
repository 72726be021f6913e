"""What a rank makes of its command line under `launch`, and that plans of another layout are never read."""

import contextlib
import itertools
import signal
from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.cost import CPU_RATES, ModelShape
from megatron_dynapipe.elastic.job import VARIABLE, Job, note
from megatron_dynapipe.errors import ConfigError, StoreTimeoutError
from megatron_dynapipe.integration.entry import elastic_run
from megatron_dynapipe.integration.flags.megatron_flags import TRACKER
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.settings import AnalyticCosts, PlanInputs, SplitSettings
from megatron_dynapipe.store import MemoryStore, PlanKeys
from megatron_dynapipe.units import ModelFamily

JOB = Job(most_ranks=4, wait_s=60, emergency_every=20, exclude_slow=None, slow_file="/nowhere/slow")
WORDS = ["--lr", "1e-3", "--save", "saved", "--save-interval", "100"]


def test_a_layout_given_by_hand_is_dropped() -> None:
    given = ["--lr", "1", "--pipeline-model-parallel-size", "2", "--dynapipe-layers-per-stage=3,1", "--bf16"]
    assert elastic_run.without(given, elastic_run.LAYOUT_FLAGS) == ["--lr", "1", "--bf16"]


@pytest.mark.parametrize("folder", ["", "non_persistent"])
def test_a_job_resumes_what_it_has_saved_whatever_it_began_from(tmp_path: Path, folder: str) -> None:
    words = [*WORDS, "--load", "elsewhere"]
    assert elastic_run.resuming(words, tmp_path) == []
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / TRACKER).write_text("20")
    assert elastic_run.resuming(words, tmp_path) == ["--load", str(tmp_path)]
    with pytest.raises(ConfigError, match="--finetune would begin from them anew"):
        elastic_run.resuming([*words, "--finetune"], tmp_path)


@pytest.mark.parametrize(("tracker", "kept"), [("20", {"iter_0000010", "iter_0000020"}), (None, set())])
def test_emergency_checkpoints_that_were_not_completed_are_removed(
    tmp_path: Path, tracker: str | None, kept: set[str]
) -> None:
    for name in ("iter_0000010", "iter_0000020", "iter_0000025", "other"):
        (tmp_path / name).mkdir()
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker)
    elastic_run.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == kept | {"other"}
    elastic_run.remove_unfinished(tmp_path / "absent")


@pytest.mark.parametrize(
    ("words", "every", "added"),
    [
        ([], 20, "--exit-signal-handler --non-persistent-save-interval 20 --non-persistent-ckpt-type global"),
        ([], None, "--exit-signal-handler --non-persistent-save-interval 50 --non-persistent-ckpt-type global"),
        ([], 0, "--exit-signal-handler"),
        (["--non-persistent-save-interval", "7"], 20, "--exit-signal-handler"),
        (["--use-distributed-optimizer"], 0, "--exit-signal-handler --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_checkpoints_can_be_loaded_in_every_layout(words: list[str], every: int | None, added: str) -> None:
    assert " ".join(elastic_run._saving(words, msgspec.structs.replace(JOB, emergency_every=every))) == added


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --save DIR under launch, got none"),
        (WORDS[:4], "expected --save-interval N with --save, got none"),
        ([*WORDS, "--ckpt-format", "torch"], "expected --ckpt-format torch_dist under launch, got torch"),
        ([*WORDS, "--context-parallel-size", "2"], "launch knows no layouts with context parallelism"),
    ],
)
def test_what_cannot_be_resharded_is_refused(monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt_multitask.py", *flags])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=message):
        elastic_run._words()


def test_nothing_happens_without_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    elastic_run.prepare(ModelFamily.GPT)
    with elastic_run.status():
        note("anything")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_rank_that_heard_a_notice_ends_with_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> object:
        with pytest.raises(SystemExit) as leaving, elastic_run.status():
            raise SystemExit(code)
        return leaving.value.code

    assert leave(0) == 0, "--exit-interval and --exit-duration-in-mins end the job"
    monkeypatch.setattr(elastic_run, "_heard_notice", True)
    assert leave(0) == 75
    assert leave(1) == 1


def test_events_are_appended_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events"
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(msgspec.structs.replace(JOB, events=str(path))).decode())
    monkeypatch.setenv("RANK", "3")
    note("saved")
    note("trains", iteration=7)
    events = [msgspec.json.decode(line) for line in path.read_text().splitlines()]
    assert [(event["who"], event["event"]) for event in events] == [("rank 3", "saved"), ("rank 3", "trains")]
    assert events[1]["iteration"] == 7


def inputs(**layout: int) -> PlanInputs:
    sampler = SamplerSettings(
        family=ModelFamily.GPT, seed=1, samples_per_iteration=12, max_input_length=64, max_target_length=0
    )
    shape = ModelShape(family=ModelFamily.GPT, hidden=32, heads=4, kv_channels=8, ffn=64, vocabulary=512)
    planner = PlannerSettings(
        family=ModelFamily.GPT, encoder_layers=4, decoder_layers=0, hidden_size=32, memory_limit_bytes=10**9, **layout
    )
    split = SplitSettings(name="train", sampler=sampler)
    return PlanInputs(
        data_folder="data", splits=(split,), planner=planner, costs=AnalyticCosts(shape=shape, rates=CPU_RATES)
    )


LAYOUTS = ({}, {"data_parallel": 2}, {"pipeline_parallel": 2}, {"pipeline_parallel": 4}, {"tensor_parallel": 2})


def test_every_layout_has_plans_of_its_own() -> None:
    digests = [inputs(**layout).digest() for layout in LAYOUTS]
    assert all(one != other for one, other in itertools.combinations(digests, 2))


def test_plans_of_the_layout_before_are_never_read() -> None:
    """Even if they lie in the same store under the same job's name."""
    before, now = (PlanKeys(job="job", settings_digest=inputs(**LAYOUTS[at]).digest()) for at in (1, 2))
    with contextlib.closing(MemoryStore()) as store:
        store.put(before.plan(split="train", iteration=5, replica=0, stage=0), b"stale")
        client = PlanClient(store, now, replica=0, stage=0, deadline_s=0.2)
        with pytest.raises(StoreTimeoutError):
            client.fetch("train", 5)
