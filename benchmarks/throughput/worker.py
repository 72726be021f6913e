"""One rank of one method of the throughput benchmark: runs global batches on command, and waits without computing.

    torchrun --nproc-per-node N -m benchmarks.throughput.worker SPEC.json

The driver (`run.py`) keeps a job of these per method and lets them take turns on the same batches. Rank 0 talks to it
over a socket in lines of JSON.
"""

import os
import socket
import sys
from pathlib import Path

import msgspec

from benchmarks.throughput.job import Job
from benchmarks.throughput.methods import STOCK, STOCK_PACKED, Spec
from megatron_dynapipe import config, cpu
from megatron_dynapipe.megatron.entry import bootstrap

cpu.quieten()


def main() -> None:
    """Run the commands of the driver until it closes the connection."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    flags = config.expand(spec.flags)
    device = config.early_flags(flags).dynapipe_device
    bootstrap.prepare_environment(spec.tensor_parallel, spec.pipeline_parallel, device)
    cpu.enable(device)
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.megatron.profiling.setup import prepared

    with prepared(
        flags,
        ModelFamily(spec.model),
        tensor_parallel=spec.tensor_parallel,
        pipeline_parallel=spec.pipeline_parallel,
        layers_per_stage=spec.layers_per_stage,
        chunks=spec.chunks,
    ) as setup:
        if spec.method == STOCK:
            from benchmarks.throughput.stock import StockJob

            job: Job = StockJob(spec, setup)
        elif spec.method == STOCK_PACKED:
            from benchmarks.throughput.stock_packed import StockPackedJob

            job = StockPackedJob(spec, setup)
        else:
            job = Job(spec, setup)
        driver = socket.create_connection(("127.0.0.1", spec.port)).makefile("rw") if job.rank == 0 else None
        job.say(driver, {"method": spec.method, "rank": 0})
        while (command := job.hear(driver)) is not None:
            job.say(driver, job.answer(command))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
