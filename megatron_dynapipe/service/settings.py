"""Everything the planner process is given, as one record that travels as JSON through its stdin."""

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import AnalyticCostModel, DeviceRates, ModelShape, TableCostModel
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.store import RETENTION_S, PlanKeys, StoreAddress

_AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
LEAST_AHEAD = 8
"""Iterations planned ahead where a plan takes a small part of an iteration."""
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class MeasuredCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="file"):
    """Costs measured on a device, from a cost model file at `path`, which a process opens once."""

    path: str

    @functools.lru_cache(maxsize=2)  # noqa: B019  (what is kept is meant to be: one run's costs)
    def load(self) -> TableCostModel:
        """The file's costs, read and checked at the first call; raises `CostModelError`."""
        return TableCostModel.load(Path(self.path))


class AnalyticCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="analytic"):
    """Costs computed from the model's shape and the device's rates, up to a micro-batch of this size and length."""

    shape: ModelShape
    rates: DeviceRates
    max_size: _AtLeastOne = 4096
    max_length: _AtLeastOne = 16384

    @functools.lru_cache(maxsize=2)  # noqa: B019  (likewise)
    def load(self) -> AnalyticCostModel:
        """The model, tabulated once; raises `CostModelError`."""
        return AnalyticCostModel(self.shape, self.rates, max_size=self.max_size, max_length=self.max_length)


class SplitSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The iterations of one split that are planned.

    Attributes:
        name: "train", "valid" or "test": the split's files in the dataset folder.
        sampler: what decides its samples.
        first_iteration: where a fresh or resumed run begins.
        first_sample: the place in the stream of samples at which it does: so many were drawn before.
        iterations: how many are planned in all; None plans for as long as training goes on.
        evaluation: batches of one evaluation, which has no backward passes; every one is of the same samples. None
            trains.
    """

    name: str
    sampler: SamplerSettings
    first_iteration: _AtLeastZero = 0
    first_sample: _AtLeastZero = 0
    iterations: _AtLeastZero | None = None
    evaluation: _AtLeastOne | None = None


class PlanInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything plans are made from.

    Attributes:
        data_folder: the dataset; the same samples on every node, though the folder may lie elsewhere.
        splits: what is planned, the most urgent split first where they tie.
        planner: model, layout, memory, choices.
        costs: where layers' costs come from.
        files: digests of the files by which samples are drawn, by name: those that the run began with. Empty where
            nothing is compared.
    """

    data_folder: str
    splits: Annotated[tuple[SplitSettings, ...], msgspec.Meta(min_length=1)]
    planner: PlannerSettings
    costs: MeasuredCosts | AnalyticCosts
    files: dict[str, str] = {}

    def __post_init__(self) -> None:
        names = [split.name for split in self.splits]
        if len(set(names)) != len(names):
            raise ConfigError(f"expected every split once, got {', '.join(names)}")

    def digest(self) -> str:
        """32 hexadecimal digits that are equal where plans are: on every node, and when a run is resumed."""
        samplers = {split.name: (split.sampler, split.evaluation) for split in self.splits}
        parts = msgspec.json.encode([self.planner, self.costs.load().digest, samplers], order="sorted")
        return hashlib.blake2b(parts, digest_size=16).hexdigest()

    def fields(self) -> dict[str, str]:
        """Everything but the dataset's folder, which may lie elsewhere on every node, field by field as text.

        The split is in layers, as people write it, and "null" where it is equal.
        """
        planner = msgspec.to_builtins(self.planner)
        is_equal = planner.pop("modules_per_stage") is None
        planner.pop("precedents")  # which follow from the rest
        parts = {
            "costs": self.costs.load().digest,
            "planner": planner | {"layers_per_stage": None if is_equal else self.planner.layout.layers_per_stage},
            "splits": {split.name: msgspec.to_builtins(split) for split in self.splits},
        }
        return dict(_flat("", parts))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), part)
    else:
        yield prefix, msgspec.json.encode(value).decode()


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planner process of a job.

    Attributes:
        store: where plans go; its password is why these settings never touch a command line or the environment.
        job: name of this launch.
        settings_digest: `PlanInputs.digest()`, as the readers compute it.
        planner: this process, which plans the iterations i with i mod planners = planner.
        planners: processes that share the iterations.
        cores: so many iterations this process plans at once, at most.
        look_ahead: how many iterations beyond the one in training are planned; None for as many as keep training from
            waiting, by how long the first plan takes, and at least `LEAST_AHEAD`.
        keep_behind: iterations before the one in training whose plans stay, for ranks that lag and for replays.
        retention_s: how long a key stays that nobody deletes; None keeps all, on a server of the job's own.
        idle_timeout_s: how long training may make no progress before the planner takes it for dead.
        inputs: what plans are made from.
    """

    store: StoreAddress
    job: str
    settings_digest: str
    planner: _AtLeastZero = 0
    planners: _AtLeastOne = 1
    cores: _AtLeastOne = 1
    look_ahead: _AtLeastOne | None = None
    keep_behind: _AtLeastZero = 2
    retention_s: _AtLeastOne | None = RETENTION_S
    idle_timeout_s: _Seconds = 6 * 3600.0
    inputs: PlanInputs

    @property
    def keys(self) -> PlanKeys:
        """Names of this job's plans in the store."""
        return PlanKeys(job=self.job, settings_digest=self.settings_digest)


def encode_settings(settings: ServiceSettings) -> bytes:
    """One line of JSON, password included: for a pipe, never for a log."""
    return msgspec.json.encode(settings) + b"\n"


def decode_settings(line: bytes) -> ServiceSettings:
    """The settings that `encode_settings` wrote; raises `ConfigError` naming the field that is wrong."""
    try:
        return msgspec.json.decode(line, type=ServiceSettings)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not the planner process's settings: {error}") from error
