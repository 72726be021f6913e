"""A sample that does not fit a device whole, trained in pieces: planned and measured.

    export OMP_NUM_THREADS=1
    megatron-dynapipe profile --model gpt --output long.json --recompute full --vocabulary 256 --max-positions 32768 \
        --budget-minutes 3 -- --num-layers 1 --hidden-size 128 --num-attention-heads 4 --seq-length 32768 \
        --max-position-embeddings 32768 --global-batch-size 1 --attention-dropout 0 --hidden-dropout 0 \
        --dynapipe-device cpu --calculate-per-token-loss --train-iters 1 --lr 1 --eval-interval 1
    python -m benchmarks.executor.long_sample --cost-model long.json [--length 32768] [--share 0.6]

One process trains a GPT on one sample under full recomputation, first whole, whose peak of activations is measured.
Then a plan is made within `share` of that peak, which has to cut the sample, and run. Printed are both peaks, the
limit, and what the planner says of the sample whole.
"""

from megatron_dynapipe import cpu
from megatron_dynapipe.costing import model_of_layers

ON_CPU = cpu.enable()

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common import wall_clock
from benchmarks.executor import overhead, pieces
from benchmarks.executor.pairs import add_arguments
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.memory import peak_bytes
from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, BatchLayout, ModelFamily, Recompute
from megatron_dynapipe.costing import TableCostModel
from megatron_dynapipe.data.segments import CutSegment
from megatron_dynapipe.runtime.memory import LiveStorages
from megatron_dynapipe.sampling import GlobalBatch


def planner(options: argparse.Namespace, limit_bytes: int, slices: str) -> Planner:
    settings = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, options.layers),
        hidden_size=options.hidden,
        memory_limit_bytes=limit_bytes,
        model_state_bytes=(0,),  # what is compared are activations
        element_bytes=4,
        recompute=(Recompute.FULL,),
        micro_batch_layouts=tuple(BatchLayout),
        slices=slices,
    )
    return planner_of(settings, TableCostModel.load(options.cost_model))


def row_of(micro_batch: MicroBatch) -> tuple[int, pieces.Cuts]:
    (piece,), (tokens,) = micro_batch.pieces, micro_batch.input_lengths
    return piece.end - piece.start, {0: CutSegment(0, piece.start, piece.end < tokens - 1)}


def peak_mb(iteration: pieces.Iteration, rows: Sequence[tuple[int, pieces.Cuts]]) -> tuple[float, float]:
    """Peak of what is alive besides the model in an iteration, in MB, and its seconds."""
    with LiveStorages() as live:
        seconds = wall_clock(lambda: iteration(rows))
    return live.peak_bytes / BYTES_PER_MB, seconds


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    iteration = pieces.iterations(options, device, recompute=True)
    whole_mb, whole_s = peak_mb(iteration, [(options.length, {})])
    limit_mb = options.share * whole_mb
    batch, limit_bytes = GlobalBatch.of_positions([options.length], 0), int(limit_mb * BYTES_PER_MB)
    try:
        planner(options, limit_bytes, "off").plan(batch, 0)
        said = "fits"
    except InfeasibleError as error:
        said = error.message
    plan = planner(options, limit_bytes, "auto").plan(batch, 0)
    (share,) = plan.replicas
    rows = sorted((row_of(each) for each in share.micro_batches), key=lambda row: row[1][0].start)
    in_pieces_mb, in_pieces_s = peak_mb(iteration, rows)
    return {
        "whole_mb": whole_mb,
        "whole_s": whole_s,
        "limit_mb": limit_mb,
        "whole": said,
        "pieces": [length for length, _ in rows],
        "planned_mb": peak_bytes(plan, share, 0) / BYTES_PER_MB,
        "pieces_mb": in_pieces_mb,
        "pieces_s": in_pieces_s,
        "fits": in_pieces_mb <= limit_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, length=32768, hidden=128, layers=1, vocabulary=256)
    parser.add_argument("--cost-model", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.6)
    options = parser.parse_args()
    os.environ |= pieces.ALONE
    with overhead.processes() as device:
        print(json.dumps(vars(options) | {"cost_model": str(options.cost_model)} | compare(options, device)))


if __name__ == "__main__":
    main()
