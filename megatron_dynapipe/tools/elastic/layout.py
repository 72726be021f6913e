"""The layout for as many ranks as are there: the fastest that `tune` finds. Ranks ask before they make process groups.

layout = layout_for("segments.json", lengths, memory_limit_bytes=…)     a user's own model; then
dist.init_process_group(…)
part = split_model(model, batch, split_points=layout.split_points, replicas=layout.replicas)
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.samples import batch_of_positions
from megatron_dynapipe.runtime.start_store import from_rank_0, renew
from megatron_dynapipe.tools.tuning import TunedLayout, tune_segments


def agreed_layout(
    choose: Callable[[int], TunedLayout], *, timeout_s: float, describe: Callable[[TunedLayout], str]
) -> TunedLayout:
    """The layout of all ranks that are there, chosen by rank 0.

    Raises:
        ConfigError: on every rank: no layout fits.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))

    def make() -> str:
        began = time.monotonic()
        layout = choose(ranks)
        if layout.predicted_ms is None:
            raise ConfigError(
                f"no layout of {ranks} ranks fits: {layout.error}",
                hint="`megatron-dynapipe tune` shows what is wrong with each; torchrun --nnodes MIN:MAX says how many"
                " nodes a start waits for",
            )
        seconds = time.monotonic() - began
        print(f"layout: {ranks} ranks: {describe(layout)}; chosen in {seconds:.1f} s", flush=True)
        return msgspec.json.encode(layout).decode()

    return msgspec.json.decode(from_rank_0("layout", make, timeout_s=timeout_s), type=TunedLayout)


class ModuleLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks that are there train a model of segments.

    Attributes:
        stages: ranks of each pipeline.
        stage_of: the stage of each segment.
        split_points: names of the modules at which stages begin; empty with one stage.
    """

    replicas: int
    stages: int
    stage_of: tuple[int, ...]
    split_points: tuple[str, ...]
    predicted_ms: float

    @classmethod
    def of(cls, layout: TunedLayout, costs: SegmentCosts) -> Self:
        """A planned division of these segments."""
        assert layout.layers_per_stage is not None and layout.predicted_ms is not None
        stage_of = tuple(stage for stage, count in enumerate(layout.layers_per_stage) for _ in range(int(count)))
        changes = zip(costs.points, stage_of, stage_of[1:], strict=False)
        return cls(
            replicas=layout.data_parallel,
            stages=layout.pipeline_parallel,
            stage_of=stage_of,
            split_points=tuple(point for point, before, after in changes if after != before),
            predicted_ms=layout.predicted_ms,
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

    Rank 0 chooses for all. Under torchrun, process groups that are made afterwards meet in a store of this start.

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
    renew(timeout_s)
    known = costs if isinstance(costs, SegmentCosts) else SegmentCosts.load(Path(costs))

    def choose(ranks: int) -> TunedLayout:
        batches = [batch_of_positions(batch, number) for number, batch in enumerate(lengths)]
        tuning = tune_segments(known, batches, devices=ranks, memory_limit_bytes=memory_limit_bytes, network=network)
        return tuning.layouts[0]

    layout = agreed_layout(choose, timeout_s=timeout_s, describe=lambda layout: str(ModuleLayout.of(layout, known)))
    return ModuleLayout.of(layout, known)
