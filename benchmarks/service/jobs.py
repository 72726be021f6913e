"""Jobs for the plan service without training: datasets that are lengths alone, and settings of their planners."""

from pathlib import Path

import numpy as np

from megatron_dynapipe.cost import A100_RATES, ModelShape
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.sampling.lengths import HEADER, MAGIC
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import StoreAddress, new_job_name
from megatron_dynapipe.units import ModelFamily


def write_lengths(folder: Path, *, samples: int, mean: int, longest: int, seed: int = 0) -> None:
    """A dataset whose samples have these lengths and no tokens: skewed, as instructions' are; planners read lengths."""
    random = np.random.default_rng(seed)
    whole = np.clip(random.lognormal(np.log(mean) - 0.5, 1.0, samples), 4, longest).astype(np.int64)
    targets = np.maximum(whole // 8, 1)
    lengths = np.stack([whole - targets, targets], axis=1).reshape(-1).astype(np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * 2
    documents = np.arange(0, len(lengths) + 1, 2, dtype=np.int64)
    header = HEADER.pack(MAGIC, 1, 8, len(lengths), len(documents))
    (folder / "train.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    with (folder / "train.bin").open("wb") as file:
        file.truncate(2 * int(lengths.sum()))


def service_settings(
    store: StoreAddress,
    folder: Path,
    *,
    layout: tuple[int, int, int],
    layers: int,
    hidden: int,
    samples: int,
    longest: int,
    memory_mb: int = 60_000,
    **changes: object,
) -> ServiceSettings:
    """A job of a GPT in (data, tensor, pipeline) parallelism that trains this many samples per iteration."""
    data, tensor, pipeline = layout
    sampler = SamplerSettings(family=ModelFamily.GPT, seed=1, samples_per_iteration=samples, max_input_length=longest)
    heads = max(hidden // 128, 2)
    shape = ModelShape(
        family=ModelFamily.GPT,
        hidden=hidden,
        heads=heads,
        kv_channels=hidden // heads,
        ffn=4 * hidden,
        vocabulary=32_000,
    )
    inputs = PlanInputs(
        data_folder=str(folder),
        splits=(SplitSettings(name="train", sampler=sampler),),
        planner=PlannerSettings(
            family=ModelFamily.GPT,
            encoder_layers=layers,
            hidden_size=hidden,
            data_parallel=data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            memory_limit_bytes=memory_mb * 1_000_000,
            distributed_optimizer=True,
        ),
        costs=AnalyticCosts(shape=shape, rates=A100_RATES, max_size=256, max_length=longest),
    )
    fields: dict[str, object] = {
        "store": store,
        "job": new_job_name(),
        "settings_digest": inputs.digest(),
        "inputs": inputs,
        "retention_s": None,
    }
    return ServiceSettings(**(fields | changes))  # type: ignore[arg-type]
