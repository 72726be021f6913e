"""Computed costs held against figures that others measured: iterations of samples of one length, 1F1B or interleaved.

    python -m benchmarks.cost_accuracy.published

Every row is predicted from its model and layout by the analytic costs of its device; nothing is fitted to them. What a
source leaves open (the size of micro-batches, virtual stages) is the fastest that fits the memory. Predicted are
forward, backward, transfers and the optimizer's step; reductions overlap with backward passes. Printed are both times,
the error of each row, the median by source, and how many pairs of one model's rows are in the right order by samples a
second and device.

    SC21    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", table
            1: A100, 2,048 tokens, vocabulary 51,200, full recomputation; sizes of micro-batches and virtual stages from
            Megatron-LM's examples/academic_paper_scripts/sc21/run_table_1.sh
    MLSys23 Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", table 5: the same, with
            full recomputation, and with selective one and sequence parallelism
    2024    Megatron-LM's README, images/model_table.png: H100, bf16, 4,096 tokens, vocabulary 131,072
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.common import markdown
from megatron_dynapipe.cost import AnalyticCostModel, ModelShape, Network
from megatron_dynapipe.cost.devices import rates_of
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.samples import Samples, batch_of_positions
from megatron_dynapipe.planning.schedules import ScheduleSettings, schedule
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tools.tuning.evaluate import StepRates, step_ns
from megatron_dynapipe.units import ModelFamily, Recompute

FULL, SELECTIVE, NONE = Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE
LINKS = {"intra_node_latency_us": 10.0, "inter_node_latency_us": 20.0}
NETWORKS = {
    "A100": Network(intra_node_gbps=1920.0, inter_node_gbps=200.0, **LINKS),
    "H100": Network(intra_node_gbps=3040.0, inter_node_gbps=400.0, **LINKS),
}
"""As the package's files of clusters have them."""
MEMORY_BYTES = 80 * 10**9


class Row(NamedTuple):
    """A measured row; `seconds` of an iteration, or TFLOP/s of a device by the source's own formula. 0: left open."""

    source: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    devices: int
    batch: int
    size: int = 0
    chunks: int = 1
    recompute: Recompute = FULL
    tflops: float = 0.0
    seconds: float = 0.0

    @property
    def device(self) -> str:
        """Its kind."""
        return "H100" if self.source == "2024" else "A100"

    @property
    def text(self) -> tuple[int, int]:
        """Positions of a sample, and the vocabulary."""
        return (4096, 131_072) if self.source == "2024" else (2048, 51_200)

    @property
    def operations(self) -> float:
        """Of an iteration by the source's formula: with recomputation in SC21's, of the model alone in the others'."""
        length, vocabulary = self.text
        linear = self.batch * length * self.layers * self.hidden**2
        head = vocabulary / (12 * self.layers * self.hidden)
        if self.source == "SC21":
            return 96 * linear * (1 + length / 6 / self.hidden + head * 12 / 16)
        return 72 * linear * (1 + length / 6 / self.hidden + head)

    @property
    def measured(self) -> float:
        """Seconds of an iteration."""
        return self.seconds or self.operations / self.tflops / 1e12 / self.devices


S, M, N = "SC21", "MLSys23", "2024"
ROWS = (
    Row(S, 24, 2304, 24, 1, 1, 32, 512, 16, tflops=137),
    Row(S, 32, 3072, 30, 2, 1, 64, 512, 16, tflops=138),
    Row(S, 32, 4096, 36, 4, 1, 128, 512, 16, tflops=142),
    Row(S, 48, 6144, 40, 8, 1, 256, 1024, 8, tflops=135),
    Row(S, 64, 8192, 48, 8, 2, 512, 1536, 4, tflops=138),
    Row(S, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, tflops=140),
    Row(S, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, tflops=148),
    Row(S, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, tflops=155),
    Row(S, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, tflops=163),
    Row(S, 160, 25600, 128, 8, 64, 3072, 3072, 1, tflops=163),
    Row(M, 64, 6144, 48, 8, 1, 8, 4, 4, seconds=1.42),
    Row(M, 64, 6144, 48, 8, 1, 8, 4, 4, recompute=SELECTIVE, seconds=1.10),
    Row(M, 96, 12288, 96, 8, 8, 64, 64, 1, 3, seconds=18.13),
    Row(M, 96, 12288, 96, 8, 8, 64, 64, 1, 3, SELECTIVE, seconds=13.75),
    Row(M, 128, 20480, 105, 8, 35, 280, 280, 1, 3, seconds=49.05),
    Row(M, 128, 20480, 105, 8, 35, 280, 280, 1, 3, SELECTIVE, seconds=37.83),
    Row(M, 160, 25600, 128, 8, 64, 512, 512, 1, seconds=94.42),
    Row(M, 160, 25600, 128, 8, 64, 512, 512, 1, recompute=SELECTIVE, seconds=71.49),
    *(
        Row(N, heads, hidden, layers, tensor, pipeline, devices, batch, chunks=0, recompute=NONE, tflops=tflops)
        for heads, hidden, layers, tensor, pipeline, devices, batch, tflops in (
            (16, 2048, 24, 1, 1, 48, 192, 408.8),
            (32, 4096, 30, 2, 1, 96, 192, 465.9),
            (48, 6144, 32, 4, 1, 192, 192, 489.1),
            (56, 7168, 48, 8, 1, 384, 192, 459.6),
            (64, 8192, 84, 8, 2, 768, 384, 419.7),
            (80, 10240, 92, 8, 4, 1536, 768, 420.5),
            (96, 12288, 96, 8, 6, 2304, 1152, 432.8),
            (128, 16384, 96, 8, 8, 3072, 1536, 474.4),
            (144, 18432, 112, 8, 16, 6144, 3072, 459.9),
        )
    ),
)


def main() -> None:
    """Print every row and what they come to."""
    predicted = [predict(row) for row in ROWS]
    lines = []
    for row, seconds in zip(ROWS, predicted, strict=True):
        layout = f"{row.devices // row.tensor // row.pipeline},{row.tensor},{row.pipeline}"
        cells = (row.source, f"{row.hidden} × {row.layers}", layout, row.recompute.value, f"{row.measured:.2f}")
        lines.append([*cells, f"{seconds:.2f}", f"{seconds / row.measured - 1:+.0%}"])
    print(markdown(["source", "model", "layout", "recompute", "measured, s", "predicted, s", "error"], lines))
    for source in (S, M, N, None):
        found = [(row, seconds) for row, seconds in zip(ROWS, predicted, strict=True) if source in (None, row.source)]
        print(f"{source or 'all'}, {len(found)} rows: median error {median_error(found):.1%}")
    print(
        "order right in {} of {} pairs of one model on one device".format(
            *order(list(zip(ROWS, predicted, strict=True)))
        )
    )


def median_error(predictions: Sequence[tuple[Row, float]]) -> float:
    """Of predicted seconds, relative."""
    return statistics.median(abs(seconds / row.measured - 1) for row, seconds in predictions)


def order(predictions: Sequence[tuple[Row, float]]) -> tuple[int, int]:
    """Pairs of layouts of one model whose speeds on a device are in the order of the measured ones, and all pairs."""
    right = pairs = 0
    for (one, predicted), (other, by) in itertools.combinations(predictions, 2):
        if (one.device, one.hidden, one.layers) == (other.device, other.hidden, other.layers):
            work = [row.batch / row.devices for row in (one, other)]
            measured = work[0] / one.measured > work[1] / other.measured
            right, pairs = right + (measured == (work[0] / predicted > work[1] / by)), pairs + 1
    return right, pairs


def predict(row: Row) -> float:
    """Seconds of an iteration, the fastest of what the source leaves open; infinite where none fits."""
    return min(_predictions(row), default=math.inf)


def _predictions(row: Row) -> Iterator[float]:
    device = rates_of(row.device)
    assert device is not None
    length, vocabulary = row.text
    flash = row.device == "H100"
    dropout = {"attention_dropout": not flash, "hidden_dropout": not flash}
    shape = ModelShape(
        family=ModelFamily.GPT,
        hidden=row.hidden,
        heads=row.heads,
        kv_channels=row.hidden // row.heads,
        ffn=4 * row.hidden,
        vocabulary=vocabulary,
        keeps_scores=not flash,
        **dropout,
    )
    parallel = flash or row.recompute is SELECTIVE
    costs = AnalyticCostModel(shape, device, max_size=16, max_length=length, sequence_parallel=parallel)
    replicas = row.devices // row.tensor // row.pipeline
    samples = row.batch // replicas
    for size, chunks, mode in itertools.product(
        [row.size] if row.size else [1, 2, 4],
        [row.chunks] if row.chunks else [n for n in (1, 2, 4, 7) if row.layers % (row.pipeline * n) == 0],
        [row.recompute] if row.device == "A100" else [NONE, SELECTIVE, FULL],
    ):
        if samples % size or (row.pipeline == 1 and chunks > 1):
            continue
        settings = PlannerSettings(
            family=ModelFamily.GPT,
            encoder_layers=row.layers,
            hidden_size=row.hidden,
            data_parallel=replicas,
            tensor_parallel=row.tensor,
            pipeline_parallel=row.pipeline,
            chunks=chunks,
            memory_limit_bytes=MEMORY_BYTES,
            distributed_optimizer=flash,
            recompute=(mode,),
            network=NETWORKS[row.device],
            sequence_parallel=parallel,
            layers_per_stage=None if row.layers % (row.pipeline * chunks) == 0 else _uneven(row, chunks),
        )
        try:
            planner = Planner(settings, costs)
            problem = planner.problem(Samples.of(batch_of_positions([length] * samples, 0), ModelFamily.GPT))
            shapes = np.tile([[size, length, 0]], (samples // size, 1))
            passes, covered = problem.costs(shapes, np.zeros(len(shapes), np.int64))
            if not covered.all():
                continue
            makespan = schedule(passes, ScheduleSettings(method="1f1b")).makespan_ns
        except PlanningError:
            continue
        _, optimizer = step_ns(settings, planner.tables[0].state, StepRates())
        yield (makespan + optimizer) / 1e9


def _uneven(row: Row, chunks: int) -> tuple[int, ...]:
    least, more = divmod(row.layers, row.pipeline * chunks)
    return tuple(least + (stage < more) for stage in range(row.pipeline * chunks))


if __name__ == "__main__":
    main()
