"""A job of 1,024 ranks without its training: planners, a real server, and processes that fetch as its ranks would.

    python -m benchmarks.service.large_job [--iterations 60] [--seconds 10] [--planners 1] [--readers 16]

32 replicas × 16 stages × 2 tensor ranks, 8,192 samples (about 4 million tokens) an iteration of 10 s. Each reader
process plays 64 ranks: for each it fetches and decodes the plan of the iteration after the next, at a moment of the
iteration's first fifth, as stages of a pipeline begin one after another. A fetch that finds no plan waits for it, and
is counted. Planners are the real processes. Prints the fetches' latencies after the warm-up (the iterations of the
look-ahead), how many waited, and per iteration the bytes, the processor time and the cores that it takes; exit status 1
where p99 is above 50 ms or a rank waited.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import psutil

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import A100_RATES, ModelShape, model_of_layers
from megatron_dynapipe.data.writing import write_index
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, PlannerProcess, ServiceSettings, SplitSettings
from megatron_dynapipe.service.settings import decode_settings, encode_settings
from megatron_dynapipe.store import StoreAddress, StoreServer, new_job_name, open_store
from megatron_dynapipe.store.codec import decode_entry

REPLICAS, TENSOR, STAGES = 32, 2, 16
PLACES = range(REPLICAS), range(STAGES)
LAYERS, HIDDEN, LONGEST, SAMPLES = 32, 4096, 4096, 8192
AHEAD = 2
"""How far a rank's prefetched plan is ahead of the iteration in training."""
P99_MS = 50.0
type Fetch = tuple[int, float, bool]  # iteration, milliseconds, whether the plan was not there yet


def write_lengths(folder: Path, *, samples: int, mean: int) -> None:
    """A dataset whose samples have lengths and no tokens: skewed, as instructions' are; planners read lengths."""
    random = np.random.default_rng(0)
    whole = np.clip(random.lognormal(np.log(mean) - 0.5, 1.0, samples), 4, LONGEST).astype(np.int64)
    targets = np.maximum(whole // 8, 1)
    lengths = np.stack([whole - targets, targets], axis=1).astype(np.int32)
    write_index(folder / "train", np.dtype("<u2"), lengths)
    with (folder / "train.bin").open("wb") as file:
        file.truncate(2 * int(lengths.sum()))


def service_settings(store: StoreAddress, folder: Path, planners: int) -> ServiceSettings:
    """A job of a GPT of 6.7B's layers."""
    sampler = SamplerSettings(family=ModelFamily.GPT, seed=1, samples_per_iteration=SAMPLES, max_input_length=LONGEST)
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=HIDDEN, heads=32, kv_channels=128, ffn=4 * HIDDEN, vocabulary=32_000
    )
    planner = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, LAYERS),
        hidden_size=HIDDEN,
        data_parallel=REPLICAS,
        tensor_parallel=TENSOR,
        pipeline_parallel=STAGES,
        memory_limit_bytes=60_000 * 1_000_000,
        distributed_optimizer=True,
    )
    inputs = PlanInputs(
        data_folder=str(folder),
        splits=(SplitSettings(name="train", sampler=sampler),),
        planner=planner,
        costs=AnalyticCosts(shape=shape, rates=A100_RATES, max_size=256, max_length=LONGEST),
    )
    return ServiceSettings(
        store=store, job=new_job_name(), settings_digest=inputs.digest(), inputs=inputs, retention_s=None,
        planners=planners,
    )  # fmt: skip


def read(
    encoded: bytes, ranks: Sequence[tuple[int, int]], began: float, iterations: int, seconds: float
) -> list[Fetch]:
    """One process: the fetches of these (replica, stage) in every iteration, at their moments."""
    settings, choose = decode_settings(encoded), random.Random(str(ranks[0]))
    fetches = []
    with open_store(settings.store, retention_s=None) as store:
        for iteration in range(iterations):
            start = began + iteration * seconds
            moments = sorted((start + choose.random() * seconds / 5, rank) for rank in ranks)
            for moment, (replica, stage) in moments:
                time.sleep(max(moment - time.time(), 0))
                key = key_of(settings, iteration + AHEAD, replica, stage)
                is_there = bool(store.read_progress([key]))
                asked = time.perf_counter()
                decode_entry(store.wait_any([key], timeout_s=600, what=f"the plan {key}")[1])
                fetches.append((iteration, (time.perf_counter() - asked) * 1e3, not is_there))
    return fetches


def key_of(settings: ServiceSettings, iteration: int, replica: int, stage: int) -> str:
    return settings.keys.plan(split="train", iteration=iteration, replica=replica, stage=stage)


def train(settings: ServiceSettings, began: float, iterations: int, seconds: float) -> None:
    """Announce each iteration at its time."""
    with open_store(settings.store, retention_s=None) as store:
        for iteration in range(iterations):
            time.sleep(max(began + iteration * seconds - time.time(), 0))
            store.announce(settings.keys.progress("train"), iteration)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--planners", type=int, default=1)
    parser.add_argument("--readers", type=int, default=16)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_lengths(folder, samples=60_000, mean=512)
        server = stack.enter_context(StoreServer())
        settings = service_settings(server.address, folder, options.planners)
        planners = []
        for number in range(options.planners):
            of_one = msgspec.structs.replace(settings, planner=number)
            planners.append(stack.enter_context(PlannerProcess(of_one, log_path=folder / f"planner-{number}.log")))
        started = time.time()
        with open_store(server.address, retention_s=None) as store:
            store.wait_any([key_of(settings, AHEAD, 0, 0)], timeout_s=600, what="the first plans")
            print(f"first {AHEAD + 1} iterations planned {time.time() - started:.1f} s after the start", flush=True)
            began = time.time() + 5  # readers start
            fetches = play(settings, began, options)
            keys = [key_of(settings, options.iterations, *place) for place in itertools.product(*PLACES)]
            size = sum(len(store.wait_any([key], timeout_s=60, what=key)[1]) for key in keys)
        used_s = [sum(psutil.Process(planner._process.pid).cpu_times()[:2]) for planner in planners]
        assert server._guard is not None
        (child,) = psutil.Process(server._guard.pid).children()
        planning_s = sum(used_s) / (options.iterations + AHEAD)
        print(f"planner: {planning_s:.2f} s of processor time per iteration at most, ", end="")
        least_s, cores = planning_s / 2, planning_s / options.seconds
        print(f"{cores:.2f} cores; two cores do for iterations of {least_s:.1f} s or more")
        print(f"server: {sum(child.cpu_times()[:2]) / options.iterations * 1e3:.0f} ms per iteration, ", end="")
        print(f"{child.memory_info().rss / 1e6:.0f} MB; an iteration's plans: {size / 1e6:.1f} MB")
    return report(fetches, settings.look_ahead)


def play(settings: ServiceSettings, began: float, options: argparse.Namespace) -> list[Fetch]:
    """The whole job; every fetch."""
    ranks = [place for place in itertools.product(*PLACES) for _ in range(TENSOR)]
    parts = [ranks[reader :: options.readers] for reader in range(options.readers)]
    encoded = encode_settings(settings)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.readers + 1) as pool:
        trainer = pool.apply_async(train, (settings, began, options.iterations, options.seconds))
        arguments = [(encoded, part, began, options.iterations, options.seconds) for part in parts]
        fetches = pool.starmap(read, arguments)
        trainer.get()
    return [fetch for part in fetches for fetch in part]


def report(fetches: Sequence[Fetch], warm_up: int) -> int:
    """Print what became of them; the exit status."""
    times = sorted(ms for iteration, ms, _ in fetches if iteration >= warm_up)
    waits = sum(waited for iteration, _, waited in fetches if iteration >= warm_up)
    if not times:
        sys.exit(f"no iteration after the warm-up of {warm_up}")
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{len(times):,} fetches after {warm_up} iterations:", end=" ")
    print(f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {times[-1]:.1f} ms")
    print(f"{waits} found no plan yet; load of the machine {os.getloadavg()[0]:.1f}")
    return 1 if waits or p99 > P99_MS else 0


if __name__ == "__main__":
    sys.exit(main())
