"""The layout of a user's own model for as many ranks as are there, asked for by its training script.

layout = layout_for("segments.json", lengths, memory_limit_bytes=…)     before the process group is made
dist.init_process_group(…)                                              of the ranks that train
part = split_model(model, batch, split_points=layout.split_points, replicas=layout.replicas)
"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.elastic.job import CANNOT_START, Job, says_first
from megatron_dynapipe.elastic.layout import ElasticLayout, agree_on_layout, choose
from megatron_dynapipe.errors import ConfigError, CostModelError, DataError
from megatron_dynapipe.planning.samples import batch_of_positions
from megatron_dynapipe.tuning import TunedLayout, tune_segments


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
