"""The layout for as many ranks as are there: the best that `tune` finds, kept for the next time they are as many.

ranks there     6     layouts of 6, else of 5, … of 1: the first number that has any; ranks beyond it stand by
none            ►     layouts of 7, 8, … up to the job's most: how many ranks to wait for
none            ►     an error
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning import Space, TunedLayout, tune

_MOST_BYTES = 100_000


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    layers_per_stage: tuple[int, ...] = ()
    predicted_ms: float = 0.0
    reason: str = ""

    @classmethod
    def of(cls, best: TunedLayout, ranks: int, reason: str) -> Self:
        """A layout that was planned."""
        assert best.predicted_ms is not None and best.layers_per_stage is not None
        return cls(
            ranks=ranks,
            needed=ranks,
            data_parallel=best.data_parallel,
            tensor_parallel=best.tensor_parallel,
            pipeline_parallel=best.pipeline_parallel,
            layers_per_stage=best.layers_per_stage,
            predicted_ms=best.predicted_ms,
            reason=reason,
        )

    def words(self) -> list[str]:
        """The layout as flags."""
        words = ["--tensor-model-parallel-size", str(self.tensor_parallel)]
        words += ["--pipeline-model-parallel-size", str(self.pipeline_parallel)]
        if self.pipeline_parallel > 1:
            words += ["--dynapipe-layers-per-stage", ",".join(map(str, self.layers_per_stage))]
        return words

    def __str__(self) -> str:
        stages = ",".join(map(str, self.layers_per_stage))
        return (
            f"{self.data_parallel} replicas × {self.tensor_parallel} tensor-parallel × {self.pipeline_parallel} stages"
            f" ({stages} layers), {self.predicted_ms:.0f} ms an iteration predicted"
        )


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice depends on besides costs and batches.

    Attributes:
        base: the planner's settings of the model on one device.
        ranks: that are there.
        most_ranks: of the job, with all nodes there.
        tensor_sizes: of tensor parallelism, those that the job's checkpoints can be loaded under.
        distributed_optimizer: whether the job's checkpoints are of one.
        global_batch_size: samples that replicas must divide; None where batches differ.
    """

    base: PlannerSettings
    ranks: int
    most_ranks: int
    tensor_sizes: tuple[int, ...]
    distributed_optimizer: bool
    global_batch_size: int | None


def choose(question: Question, cost_model: CostModel, batches: Sequence[GlobalBatch]) -> Choice:
    """The layout of the most ranks that have one, or how many ranks to wait for.

    Raises:
        ConfigError: no number of ranks up to the job's most has a layout.
    """
    return choose_of(question.ranks, question.most_ranks, lambda ranks: _best(question, cost_model, batches, ranks))


def choose_of(ranks_there: int, most_ranks: int, best: Callable[[int], TunedLayout]) -> Choice:
    """The layout of the most ranks that have one, or how many ranks to wait for.

    Args:
        ranks_there: how many there are.
        most_ranks: of the job, with all nodes there.
        best: the best layout of a number of ranks; one without a predicted time where none fits.

    Raises:
        ConfigError: no number of ranks up to the job's most has a layout.
    """
    reason = ""
    for ranks in range(ranks_there, 0, -1):
        layout = best(ranks)
        if layout.predicted_ms is not None:
            return Choice.of(layout, ranks, reason)
        reason = reason or f"{ranks} ranks: {layout.error}"
    for ranks in range(ranks_there + 1, most_ranks + 1):
        if best(ranks).predicted_ms is not None:
            return Choice(ranks=0, needed=ranks, reason=reason)
    raise ConfigError(
        f"no layout of up to {max(ranks_there, most_ranks)} ranks fits ({reason})",
        hint="`megatron-dynapipe tune` shows what is wrong with each; more nodes: --nnodes MIN:MAX",
    )


def cached(question: Question, cost_model: CostModel, batches: Sequence[GlobalBatch], folder: Path) -> Choice:
    """`choose`, from `folder` where the same was asked before."""
    return kept(folder, _digest(question, cost_model, batches), lambda: choose(question, cost_model, batches))


def kept(folder: Path, digest: str, make: Callable[[], Choice]) -> Choice:
    """The choice that `folder` holds under a digest of what was asked; made and kept there if it holds none."""
    path = folder / f"layout-{digest}.json"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(read_bounded(path, most_bytes=_MOST_BYTES), type=Choice)
    choice = make()
    with suppress(OSError):  # it is only a cache
        folder.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".unfinished")
        fresh.write_bytes(msgspec.json.encode(choice))
        fresh.replace(path)
    return choice


def _best(question: Question, cost_model: CostModel, batches: Sequence[GlobalBatch], ranks: int) -> TunedLayout:
    space = Space(
        devices=ranks,
        distributed_optimizer=question.distributed_optimizer,
        tensor_sizes=question.tensor_sizes,
        global_batch_size=question.global_batch_size,
    )
    return tune(question.base, cost_model, batches, space, top=1).layouts[0]


def _digest(question: Question, cost_model: CostModel, batches: Sequence[GlobalBatch]) -> str:
    """Of everything a choice depends on."""
    state = hashlib.blake2b(digest_size=12)
    state.update(msgspec.json.encode(question))
    state.update(cost_model.digest.encode())
    for batch in batches:
        state.update(batch.input_lengths.tobytes() + b"|" + batch.target_lengths.tobytes() + b"|")
    return state.hexdigest()
