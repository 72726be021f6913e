"""Computed costs held against figures that others measured: iterations of samples of one length, 1F1B or interleaved.

    python -m benchmarks.cost_accuracy.published

Every row is predicted from its model and layout by the analytic costs of its device; nothing is fitted to them. What a
source leaves open (the size of micro-batches, virtual stages) is the fastest that fits the memory; what it states did
fit, so that no limit is asked of it. Predicted are forward, backward, transfers and the optimizer's step; reductions
overlap with backward passes. Printed are both times, the error of each row, the median by source, and how many pairs of
rows of one model, length and device that differ in tensor or pipeline parallelism are in the right order by samples a
second and device.

    SC21    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", table
            1: A100, 2,048 tokens, vocabulary 51,200, full recomputation; sizes of micro-batches and virtual stages from
            Megatron-LM's examples/academic_paper_scripts/sc21/run_table_1.sh
    WANT23  Hagemann et al., "Efficient Parallelization Layouts for Large-Scale Distributed Model Training": LLaMA's
            layers on A100s, bf16, FlashAttention 2, sequence parallelism, no recomputation, one sample a micro-batch,
            1F1B, sharded optimizer. Step times of data/seqpara in Aleph-Alpha's repository of the paper (e13c2cb of
            2023-12-16), all of one sample a micro-batch with the RMSNorm kernel; the batch (2,048 samples, 512 of
            8,192 tokens) and the vocabulary of 128,000 are those by which its MFU are these times
    2024    Megatron-LM's README, images/model_table.png: H100, bf16, 4,096 tokens, vocabulary 131,072
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.common import markdown
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.orders import ScheduleSettings, schedule
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import AnalyticCostModel, ModelShape, Network, model_of_layers
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning.evaluate import StepRates, step_ns

FULL, SELECTIVE, NONE = Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE
LINKS = {"intra_node_latency_us": 10.0, "inter_node_latency_us": 20.0}
NETWORKS = {
    "A100-SXM4-80GB": Network(intra_node_gbps=1920.0, inter_node_gbps=200.0, **LINKS),
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
    length: int = 2048
    ffn: int = 0

    @property
    def device(self) -> str:
        """Its kind."""
        return "H100" if self.source == "2024" else "A100-SXM4-80GB"

    @property
    def vocabulary(self) -> int:
        """Of its source."""
        return {"SC21": 51_200, "WANT23": 128_000, "2024": 131_072}[self.source]

    @property
    def operations(self) -> float:
        """Of an iteration by the source's formula: with recomputation in SC21's, of the model alone in the others'."""
        linear = self.batch * self.length * self.layers * self.hidden**2
        length, head = self.length, self.vocabulary / (12 * self.layers * self.hidden)
        if self.source == "SC21":
            return 96 * linear * (1 + length / 6 / self.hidden + head * 12 / 16)
        return 72 * linear * (1 + length / 6 / self.hidden + head)

    @property
    def measured(self) -> float:
        """Seconds of an iteration."""
        return self.seconds or self.operations / self.tflops / 1e12 / self.devices


S, W, N = "SC21", "WANT23", "2024"
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
    *(
        Row(W, heads, hidden, layers, tensor, pipeline, devices, batch, 1, 1, NONE, 0.0, seconds, 2**22 // batch, ffn)
        for heads, hidden, layers, ffn, devices, batch, layouts in (
            (40, 5120, 40, 13824, 32, 2048, ((1, 1, 53.99), (1, 2, 58.01), (2, 1, 60.96), (2, 2, 66.26))),
            (40, 5120, 40, 13824, 64, 512, ((2, 2, 34.84), (2, 4, 35.80), (4, 1, 36.99), (4, 2, 38.85))),
            (40, 5120, 40, 13824, 64, 512, ((4, 4, 40.82), (8, 1, 46.37), (8, 2, 49.96), (8, 4, 54.78))),
            (52, 6656, 60, 17920, 64, 2048, ((1, 4, 72.60), (2, 2, 76.84), (2, 4, 76.58))),
            (52, 6656, 60, 17920, 64, 2048, ((4, 1, 89.33), (4, 2, 85.47), (4, 4, 87.68))),
            (52, 6656, 60, 17920, 64, 512, ((4, 2, 84.37), (4, 4, 85.69), (4, 8, 86.17), (4, 16, 86.16))),
            (64, 8192, 80, 22016, 64, 2048, ((2, 4, 147.02), (2, 8, 149.97), (4, 2, 162.32), (4, 4, 159.57))),
            (64, 8192, 80, 22016, 64, 2048, ((4, 8, 166.36), (8, 2, 192.45), (8, 4, 198.11), (8, 8, 201.44))),
        )
        for tensor, pipeline, seconds in layouts
    ),
    *(
        Row(N, heads, hidden, layers, tensor, pipeline, devices, batch, 0, 0, NONE, tflops, length=4096)
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
    for source in (S, W, N, None):
        found = [(row, seconds) for row, seconds in zip(ROWS, predicted, strict=True) if source in (None, row.source)]
        print(f"{source or 'all'}, {len(found)} rows: median error {median_error(found):.1%}")
    print(
        "order right in {} of {} pairs of one model that differ in tensor or pipeline parallelism".format(
            *order(list(zip(ROWS, predicted, strict=True)))
        )
    )


def median_error(predictions: Sequence[tuple[Row, float]]) -> float:
    """Of predicted seconds, relative."""
    return statistics.median(abs(seconds / row.measured - 1) for row, seconds in predictions)


def order(predictions: Sequence[tuple[Row, float]]) -> tuple[int, int]:
    """Pairs of rows that differ in layout alone whose speeds are in the order of the measured ones, and all pairs."""
    right = pairs = 0
    for (one, predicted), (other, by) in itertools.combinations(predictions, 2):
        alike = all(getattr(one, of) == getattr(other, of) for of in ("source", "hidden", "layers", "length"))
        if alike and (one.tensor, one.pipeline) != (other.tensor, other.pipeline):
            work = [row.batch / row.devices for row in (one, other)]
            measured = work[0] / one.measured > work[1] / other.measured
            right, pairs = right + (measured == (work[0] / predicted > work[1] / by)), pairs + 1
    return right, pairs


def predict(row: Row) -> float:
    """Seconds of an iteration, the fastest of what the source leaves open; infinite where none fits."""
    return min(_predictions(row), default=math.inf)


def _predictions(row: Row) -> Iterator[float]:
    device, length = rates_of(row.device), row.length
    assert device is not None
    flash, llama = row.source != S, row.source == W
    shape = ModelShape(
        family=ModelFamily.GPT,
        hidden=row.hidden,
        heads=row.heads,
        kv_channels=row.hidden // row.heads,
        ffn=row.ffn or 4 * row.hidden,
        vocabulary=row.vocabulary,
        gated=llama,
        rms_norm=llama,
        biases=not llama,
        rotary=llama,
        tied=not llama,
        keeps_scores=not flash,
        attention_dropout=not flash,
        hidden_dropout=not flash,
    )
    costs = AnalyticCostModel(shape, device, max_size=16, max_length=length, sequence_parallel=flash)
    replicas = row.devices // row.tensor // row.pipeline
    samples = row.batch // replicas
    for size, chunks, mode in itertools.product(
        [row.size] if row.size else [1, 2, 4],
        [row.chunks] if row.chunks else [n for n in (1, 2, 4, 7) if row.layers % (row.pipeline * n) == 0],
        [NONE, SELECTIVE, FULL] if row.source == N else [row.recompute],
    ):
        if samples % size or (row.pipeline == 1 and chunks > 1):
            continue
        model = model_of_layers(ModelFamily.GPT, row.layers)
        is_equal = row.layers % (row.pipeline * chunks) == 0
        settings = PlannerSettings(
            model=model,
            hidden_size=row.hidden,
            data_parallel=replicas,
            tensor_parallel=row.tensor,
            pipeline_parallel=row.pipeline,
            chunks=chunks,
            memory_limit_bytes=MEMORY_BYTES if row.source == N else 10 * MEMORY_BYTES,
            distributed_optimizer=flash,
            recompute=(mode,),
            network=NETWORKS[row.device],
            sequence_parallel=flash,
            modules_per_stage=None if is_equal else model.modules_of(_uneven(row, chunks)),
        )
        try:
            planner = planner_of(settings, costs)
            problem = planner.problem(Samples.of(GlobalBatch.of_positions([length] * samples, 0), ModelFamily.GPT))
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
