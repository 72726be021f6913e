"""The layout for as many ranks as are there: the best that `tune` finds, kept for the next time they are as many.

ranks there     6     layouts of 6, else of 5, … of 1: the first number that has any; ranks beyond it stand by
none            ►     layouts of 7, 8, … up to the job's most: how many ranks to wait for
none            ►     an error

Ranks ask before they make process groups: rank 0 chooses for all.

The training script of a user's own model asks for its layout:

layout = layout_for("segments.json", lengths, memory_limit_bytes=…)     before the process group is made
dist.init_process_group(…)                                              of the ranks that train
part = split_model(model, batch, split_points=layout.split_points, replicas=layout.replicas)
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from megatron_dynapipe.cost import CostModel, Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.elastic.job import CANNOT_START, LEFT, Job, agent_store, from_rank_0, says_first
from megatron_dynapipe.errors import ConfigError, CostModelError, DataError
from megatron_dynapipe.files import read_bounded, user_cache_folder
from megatron_dynapipe.outputs import replace_bytes
from megatron_dynapipe.planning.samples import batch_of_positions
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning import Space, TunedLayout, tune, tune_segments

_MOST_BYTES = 100_000
_ENDED = "run/ended"
_POLL_S = 1.0


class ElasticLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layout, or how many ranks there must be for one.

    Attributes:
        ranks: that train; 0 where there is no layout for those there are.
        needed: ranks that must be there for a layout: `ranks`, or more than are there.
        data_parallel, tensor_parallel, pipeline_parallel: the layout.
        layers_per_stage: of every stage.
        predicted_ms: of an iteration.
        reason: why there is no layout for more of the ranks that are there; empty if all train.
    """

    ranks: int
    needed: int
    data_parallel: int = 0
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    layers_per_stage: tuple[int | float, ...] = ()
    predicted_ms: float = 0.0
    reason: str = ""

    @classmethod
    def of(cls, best: TunedLayout, ranks: int, reason: str) -> Self:
        """A layout that was planned."""
        assert best.predicted_ms is not None and best.layers_per_stage is not None
        taken = {name: getattr(best, name) for name in cls.__struct_fields__ if hasattr(best, name)}
        return cls(ranks=ranks, needed=ranks, reason=reason, **taken)

    def flags(self) -> list[str]:
        """The layout as flags of a Megatron run."""
        flags = ["--tensor-model-parallel-size", str(self.tensor_parallel)]
        flags += ["--pipeline-model-parallel-size", str(self.pipeline_parallel)]
        if self.pipeline_parallel > 1:
            flags += ["--dynapipe-layers-per-stage", ",".join(map(str, self.layers_per_stage))]
        return flags

    def __str__(self) -> str:
        stages = ",".join(map(str, self.layers_per_stage))
        return (
            f"{self.data_parallel} replicas × {self.tensor_parallel} tensor-parallel × {self.pipeline_parallel} stages"
            f" ({stages} layers), {self.predicted_ms:.0f} ms an iteration predicted"
        )


def choose_for_megatron(
    base: PlannerSettings, space: Space, most_ranks: int, cost_model: CostModel, batches: Sequence[GlobalBatch]
) -> ElasticLayout:
    """`choose` among the layouts of a Megatron model.

    Raises:
        ConfigError: as `choose`.
    """

    def best(ranks: int) -> TunedLayout:
        return tune(base, cost_model, batches, msgspec.structs.replace(space, devices=ranks), top=1).layouts[0]

    lengths = [each.tobytes() for batch in batches for each in (batch.input_lengths, batch.target_lengths)]
    asked = [msgspec.json.encode([base, space]), cost_model.digest.encode(), *lengths]
    return choose(space.devices, most_ranks, best, asked=asked)


def choose(
    ranks_there: int, most_ranks: int, best: Callable[[int], TunedLayout], *, asked: Sequence[bytes]
) -> ElasticLayout:
    """The layout of the most ranks that have one, or how many ranks to wait for; kept in the user's cache folder.

    Args:
        ranks_there: how many there are.
        most_ranks: of the job, with all nodes there.
        best: the best layout of a number of ranks; one without a predicted time where none fits.
        asked: everything that `best` depends on: the same is answered from the cache.

    Raises:
        ConfigError: no number of ranks up to the job's most has a layout.
    """
    numbers = f"{ranks_there} of {most_ranks}".encode()
    digest = hashlib.blake2b(b"|".join([numbers, *asked]), digest_size=12).hexdigest()
    path = user_cache_folder() / f"layout-{digest}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(read_bounded(path, most_bytes=_MOST_BYTES), type=ElasticLayout)
    choice = _search(ranks_there, most_ranks, best)
    with suppress(OSError):  # it is only a cache
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, msgspec.json.encode(choice))
    return choice


def _search(ranks_there: int, most_ranks: int, best: Callable[[int], TunedLayout]) -> ElasticLayout:
    reason = ""
    for ranks in range(ranks_there, 0, -1):
        layout = best(ranks)
        if layout.predicted_ms is not None:
            return ElasticLayout.of(layout, ranks, reason)
        reason = reason or f"{ranks} ranks: {layout.error}"
    for ranks in range(ranks_there + 1, most_ranks + 1):
        if best(ranks).predicted_ms is not None:
            return ElasticLayout(ranks=0, needed=ranks, reason=reason)
    raise ConfigError(
        f"no layout of up to {max(ranks_there, most_ranks)} ranks fits ({reason})",
        hint="`megatron-dynapipe tune` shows what is wrong with each; more nodes: --nnodes MIN:MAX",
    )


def agree_on_layout(
    choose: Callable[[], ElasticLayout], *, timeout_s: float, describe: Callable[[ElasticLayout], str] = str
) -> ElasticLayout:
    """Have rank 0 choose for all ranks; afterwards WORLD_SIZE is the number of ranks that train.

    A rank that the layout has no use for does not return: it stands by. Nor does any where there are too few ranks for
    a layout: they wait for more.

    Raises:
        ConfigError: on every rank: no layout fits.
    """
    job, there = Job.current(), int(os.environ.get("WORLD_SIZE", "1"))

    def make() -> str:
        began = time.monotonic()
        choice = choose()
        if choice.ranks:
            chosen = f"{describe(choice)}; chosen in {time.monotonic() - began:.1f} s"
            left = f"; {there - choice.ranks} stand by ({choice.reason})" if choice.reason else ""
            print(f"layout: {choice.ranks} ranks: {chosen}{left}", flush=True)
        return msgspec.json.encode(choice).decode()

    choice = msgspec.json.decode(from_rank_0("layout", make, timeout_s=timeout_s), type=ElasticLayout)
    if not choice.ranks:
        _await_more_ranks(choice, job)
    if int(os.environ.get("RANK", "0")) >= choice.ranks:
        _stand_by(choice, timeout_s=timeout_s)
    os.environ["WORLD_SIZE"] = str(choice.ranks)
    return choice


def _await_more_ranks(choice: ElasticLayout, job: Job | None) -> NoReturn:
    """Wait until the agents start the ranks anew, with more of them."""
    here = os.environ.get("WORLD_SIZE", "1")
    needs = f"the smallest layout that fits needs {choice.needed} ranks, {here} are here ({choice.reason})"
    if job is None:
        raise ConfigError(needs, hint="start more ranks")
    if os.environ["RANK"] == "0":
        print(f"waiting for more ranks: {needs}", flush=True)
    time.sleep(job.wait_s)
    raise ConfigError(f"waited {job.wait_s:.0f} s for more ranks: {needs}", hint="start `launch` on more nodes")


def _stand_by(choice: ElasticLayout, *, timeout_s: float) -> NoReturn:
    """Do nothing until the agent ends this rank, or the run has ended."""
    print(f"rank {os.environ['RANK']} stands by: {choice.ranks} ranks train", flush=True)
    try:
        store = agent_store(timeout_s)
        while store is not None and not store.check([_ENDED]):
            time.sleep(_POLL_S)
    except RuntimeError:  # the node that hosts the store has gone
        sys.exit(LEFT)
    sys.exit(0)


def announce_end() -> None:
    """Let ranks that stand by know that the run has ended; rank 0 calls it."""
    with suppress(RuntimeError):
        if (store := agent_store(_POLL_S)) is not None:
            store.set(_ENDED, "1")


class ModuleLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks that are there train a model of segments.

    Attributes:
        replicas: of the pipeline.
        stages: ranks of each pipeline.
        stage_of: the stage of each segment.
        split_points: names of the modules at which stages begin; empty with one stage.
        predicted_ms: of an iteration.
    """

    replicas: int
    stages: int
    stage_of: tuple[int, ...]
    split_points: tuple[str, ...]
    predicted_ms: float

    @classmethod
    def of(cls, choice: ElasticLayout, costs: SegmentCosts) -> Self:
        """A choice among divisions of these segments."""
        stage_of = tuple(stage for stage, count in enumerate(choice.layers_per_stage) for _ in range(int(count)))
        changes = zip(costs.points, stage_of, stage_of[1:], strict=False)
        return cls(
            replicas=choice.data_parallel,
            stages=choice.pipeline_parallel,
            stage_of=stage_of,
            split_points=tuple(point for point, before, after in changes if after != before),
            predicted_ms=choice.predicted_ms,
        )

    def __str__(self) -> str:
        return f"{self.replicas} replicas × {self.stages} stages, {self.predicted_ms:.0f} ms an iteration predicted"


def layout_for(
    costs: SegmentCosts | str | Path,
    lengths: Sequence[Sequence[int]],
    *,
    memory_limit_bytes: int,
    network: Network | None = None,
    timeout_s: float = 300.0,
) -> ModuleLayout:
    """The fastest layout of the ranks that are there, by `tune_segments`. Every rank calls it, before it makes groups.

    Rank 0 chooses for all; the choice is kept in the user's cache folder. A rank that the layout has no use for does
    not return: it stands by, and WORLD_SIZE no longer counts it. Nor does any where there are too few ranks for a
    layout: they wait for more. Under `launch`, an error of this package that the script does not catch ends the job,
    with status 2.

    Args:
        costs: measured by `profile_module`, or the path of its file: the same on all nodes.
        lengths: of the samples of a few global batches such as those to come, in positions.
        memory_limit_bytes: of a device.
        network: links; by default those that the costs were measured with.
        timeout_s: for rank 0's choice.

    Raises:
        ConfigError: on every rank: no layout fits, or there are no batches.
        CostModelError: the costs cannot be read.
    """
    job, there = Job.current(), int(os.environ.get("WORLD_SIZE", "1"))
    if job is not None:
        sys.excepthook = partial(_end, sys.excepthook)
    known = costs if isinstance(costs, SegmentCosts) else SegmentCosts.load(Path(costs))

    def choose_for_all() -> ElasticLayout:
        most = there if job is None else max(job.most_ranks, there)
        return choose_segments(known, lengths, there, most, memory_limit_bytes, network)

    choice = agree_on_layout(
        choose_for_all, timeout_s=timeout_s, describe=lambda choice: str(ModuleLayout.of(choice, known))
    )
    return ModuleLayout.of(choice, known)


def choose_segments(
    costs: SegmentCosts,
    lengths: Sequence[Sequence[int]],
    ranks: int,
    most_ranks: int,
    memory_limit_bytes: int,
    network: Network | None,
) -> ElasticLayout:
    """`choose` among the divisions of a model of segments; raises as it does, or where there is no batch."""
    batches = [batch_of_positions(each, number) for number, each in enumerate(lengths)]

    def best(count: int) -> TunedLayout:
        return tune_segments(
            costs, batches, devices=count, memory_limit_bytes=memory_limit_bytes, network=network
        ).layouts[0]

    asked = [msgspec.json.encode(costs), msgspec.json.encode(network)]
    asked.append(json.dumps([memory_limit_bytes, [list(map(int, each)) for each in lengths]]).encode())
    return choose(ranks, most_ranks, best, asked=asked)


def _end(before: object, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's `excepthook` of a rank: an error in what was asked for is one line, and a status that says so."""
    if not isinstance(error, ConfigError | CostModelError | DataError):
        assert callable(before)
        before(kind, error, trace)
        return
    if says_first(str(error)):
        print(f"[rank {os.environ.get('RANK', '0')}] error: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(CANNOT_START)  # whatever threads and groups there are may wait for other ranks
