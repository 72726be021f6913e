"""A small dataset, settings that plan it, and a server."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CPU_RATES, ModelShape
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import Store, StoreAddress, StoreServer, new_job_name, open_store
from tests.helpers.samples import write_samples
from tests.helpers.settings import settings_in_layers

type Settings = Callable[..., ServiceSettings]


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    with StoreServer() as running:
        yield running


@pytest.fixture
def store(server: StoreServer) -> Iterator[Store]:
    with open_store(server.address, retention_s=None) as connected:
        yield connected


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    for seed, split in enumerate(("train", "valid")):
        lengths = np.random.default_rng(seed).integers(1, 120, (200, 2)).tolist()
        write_samples(folder / split, [[[0] * length for length in pair] for pair in lengths], 512)
    return folder


@pytest.fixture
def settings(server: StoreServer, data_folder: Path) -> Settings:
    """Settings of a job of its own: two replicas of two stages, train and valid."""

    def make(
        *, iterations: int | None = None, max_length: int = 128, memory_mb: int = 2000, **changes: object
    ) -> ServiceSettings:
        sampler = SamplerSettings(
            family=ModelFamily.T5,
            seed=1,
            samples_per_iteration=12,
            max_input_length=max_length,
            max_target_length=max_length,
        )
        shape = ModelShape(family=ModelFamily.T5, hidden=64, heads=2, kv_channels=32, ffn=128, vocabulary=512)
        inputs = PlanInputs(
            data_folder=str(data_folder),
            splits=(
                SplitSettings(name="train", sampler=sampler, iterations=iterations),
                SplitSettings(name="valid", sampler=sampler, evaluation=3),
            ),
            planner=settings_in_layers(
                ModelFamily.T5,
                2,
                2,
                hidden_size=64,
                data_parallel=2,
                pipeline_parallel=2,
                memory_limit_bytes=memory_mb * 1_000_000,
            ),
            costs=AnalyticCosts(shape=shape, rates=CPU_RATES, max_size=16, max_length=256),
        )
        fields: dict[str, object] = {
            "store": server.address,
            "job": new_job_name(),
            "settings_digest": inputs.digest(),
            "inputs": inputs,
            "look_ahead": 2,
        }
        return ServiceSettings(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def nowhere() -> StoreAddress:
    """An address where nobody listens."""
    return StoreAddress("redis://:hunter2@127.0.0.1:1/0")
