"""Megatron's own `pretrain` of a GPT on rows of one length, for its start: the model and samples of a run file.

    torchrun --nproc-per-node 2 benchmarks/start/stock.py FLAGS      (run.py makes them of the run file)

Of this project it has what Megatron needs on a CPU, and the dataset's samples. Megatron reads the dataset's tokenizer,
as it does by default.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import torch

from megatron_dynapipe import cpu

DATA = "BENCHMARK_DATA"
"""The variable with the dataset's folder."""


def rows(data: Path, length: int, batch: int) -> Iterator[torch.Tensor]:
    """The dataset's tokens one after another, again and again, in rows of one more than `length`: int64[batch, …]."""
    from benchmarks.throughput.rows import equal_rows
    from megatron_dynapipe.data.indexed import IndexedReader

    reader = IndexedReader(data / "train")
    samples = [tuple(reader[sample]) for sample in range(len(reader))]
    every = torch.from_numpy(equal_rows(samples, length + 1, multiple=batch))
    while True:
        yield from every.split(batch)


def main() -> None:
    cpu.quieten()
    cpu.enable("auto")  # before Megatron is imported
    from megatron.training import get_args

    from tests.helpers.stock_megatron import pretrain_on

    def datasets(_samples: Any, vp_stage: int | None = None) -> tuple[Any, None, None]:
        args = get_args()
        return rows(Path(os.environ[DATA]), args.seq_length, args.micro_batch_size), None, None

    pretrain_on(datasets)


if __name__ == "__main__":
    main()
