"""Megatron's ranks get the layout that fits them, or an error where none does."""

from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tools.elastic import entry
from megatron_dynapipe.tools.elastic.layout import agreed_layout
from megatron_dynapipe.tools.tuning import Space, TunedLayout, tune
from megatron_dynapipe.units import ModelFamily
from tests.planning.planner_cases import batch, cost_model
from tests.tools.elastic.test_entry import flags

GPT = ModelFamily.GPT
COSTS = cost_model(GPT)
BATCHES = [batch(GPT, 12)]
BASE = PlannerSettings(
    family=GPT,
    encoder_layers=4,
    decoder_layers=0,
    hidden_size=128,
    memory_limit_bytes=2 * 10**9,
    schedule=ScheduleSettings(search_evaluations=10),
)


def best(ranks: int, memory_limit_bytes: int = 2 * 10**9) -> TunedLayout:
    space = Space(devices=ranks, distributed_optimizer=False, tensor_sizes=(1,), global_batch_size=12)
    base = msgspec.structs.replace(BASE, memory_limit_bytes=memory_limit_bytes)
    return tune(base, COSTS, BATCHES, space, top=1).layouts[0]


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
        agreed_layout(lambda ranks: best(ranks, limit), timeout_s=60, describe=str)


def test_a_layout_is_given_to_parsed_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = best(1)
    for layout in (one, msgspec.structs.replace(one, pipeline_parallel=3, layers_per_stage=(2, 1, 1))):
        monkeypatch.setattr(entry, "agreed_layout", lambda *_, layout=layout, **__: layout)
        entry.fit_layout(args := flags(tmp_path, dynapipe_timeout_s=60.0), GPT, [])
        split = "equal" if layout is one else (2, 1, 1)
        assert (args.tensor_model_parallel_size, args.dynapipe_layers_per_stage) == (1, split)
        assert args.pipeline_model_parallel_size == layout.pipeline_parallel
