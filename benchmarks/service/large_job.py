"""A job of 1,024 ranks without its training: planners, a real server, and processes that fetch as its ranks would.

    python -m benchmarks.service.large_job [--iterations 60] [--seconds 10] [--planners 1] [--readers 16]
    python -m benchmarks.service.large_job --simulate [--iterations 200] [--seconds 0.14] [--planners 512] [--plans 4]

32 replicas × 16 stages × 2 tensor ranks, 8,192 samples (about 4 million tokens) an iteration of 10 s. Each reader
process plays 64 ranks: for each it fetches and decodes the plan of the iteration after the next, at a moment of the
iteration's first fifth, as stages of a pipeline begin one after another. A fetch that finds no plan waits for it, and
is counted. Planners are the real processes. Prints the fetches' latencies after the warm-up (the iterations of the
look-ahead), how many waited, and per iteration the bytes, the processor time and the cores that it takes; exit status 1
where p99 is above 50 ms or a rank waited.

With `--simulate` 4,096 ranks, 256 replicas × 8 stages × 2 tensor ranks on 512 nodes, train the same samples on H100s by
a simulated clock. The plans are made and encoded by the real planner, as many as `--plans`, in addition to the first
and the three that plans follow; the others take the same processor times in turn. Every node plans on one core.
Printed are when the first iterations begin, how many of the others waited for a plan, and how many cores planned.
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
from typing import Any

import msgspec
import numpy as np
import psutil

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import A100_RATES, DeviceRates, ModelShape, model_of_layers
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.data.writing import write_index
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, PlannerProcess, ServiceSettings, SplitSettings
from megatron_dynapipe.service.loop import look_ahead
from megatron_dynapipe.service.planned_splits import FOLLOWED, PlannedSplits
from megatron_dynapipe.service.settings import LEAST_AHEAD, decode_settings, encode_settings
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


def service_settings(
    store: StoreAddress,
    folder: Path,
    planners: int,
    layout: tuple[int, int, int] = (REPLICAS, TENSOR, STAGES),
    rates: DeviceRates = A100_RATES,
    **choices: Any,
) -> ServiceSettings:
    """A job of a GPT of 6.7B's layers, whose plans choose among `choices`."""
    sampler = SamplerSettings(family=ModelFamily.GPT, seed=1, samples_per_iteration=SAMPLES, max_input_length=LONGEST)
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=HIDDEN, heads=32, kv_channels=128, ffn=4 * HIDDEN, vocabulary=32_000
    )
    planner = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, LAYERS),
        hidden_size=HIDDEN,
        data_parallel=layout[0],
        tensor_parallel=layout[1],
        pipeline_parallel=layout[2],
        memory_limit_bytes=60_000 * 1_000_000,
        distributed_optimizer=True,
        **choices,
    )
    inputs = PlanInputs(
        data_folder=str(folder),
        splits=(SplitSettings(name="train", sampler=sampler),),
        planner=planner,
        costs=AnalyticCosts(shape=shape, rates=rates, max_size=256, max_length=LONGEST),
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
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--planners", type=int)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--plans", type=int, default=4)
    options = parser.parse_args()
    defaults = (200, 0.14, 512) if options.simulate else (60, 10.0, 1)
    for name, value in zip(("iterations", "seconds", "planners"), defaults, strict=True):
        setattr(options, name, getattr(options, name) or value)
    if options.simulate:
        return simulate(options)
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
    return report(fetches, LEAST_AHEAD)


def simulate(options: argparse.Namespace) -> int:
    """Time real plans, and follow all nodes' planners and training by a clock of their own; the exit status."""
    rates = rates_of("NVIDIA H100 80GB HBM3")
    assert rates is not None, "the device is known"
    times = []
    with tempfile.TemporaryDirectory() as folder:
        write_lengths(Path(folder), samples=60_000, mean=512)
        nowhere = StoreAddress("redis://127.0.0.1:1")
        every: dict[str, Any] = {"micro_batch_layouts": tuple(BatchLayout), "split_backward": "auto", "slices": "auto"}
        settings = service_settings(nowhere, Path(folder), options.planners, (256, 2, 8), rates, **every)
        planned = PlannedSplits(settings.inputs)
        for iteration in (0, None, *range(FOLLOWED, FOLLOWED + options.plans)):
            began = time.process_time()
            if iteration is None:
                planned.following("train", None)
            else:
                planned.entries("train", iteration)
            times.append(time.process_time() - began)
            print(f"{'what plans follow' if iteration is None else f'plan {iteration}'}: {times[-1]:.1f} s", flush=True)
    first_s, follow_s, *plans_s = times
    ahead = look_ahead(planned.needed)
    print(f"{planned.needed:.1f} cores are needed by the first plan, so {ahead} iterations are planned ahead")
    waits, spans = clock(options, ahead, first_s, follow_s, plans_s)
    most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    mean = sum(plans_s) / len(plans_s) / options.seconds
    late = {iteration: f"{wait:.1f} s before iteration {iteration}" for iteration, wait in enumerate(waits) if wait > 0}
    print(f"waits: {', '.join(late.values())}; {mean:.0f} cores keep up, {most} of {options.planners} at most planned")
    return 1 if max(late) > FOLLOWED else 0


def clock(
    options: argparse.Namespace, ahead: int, first_s: float, follow_s: float, plans_s: Sequence[float]
) -> tuple[list[float], list[tuple[float, float]]]:
    """How long training waits before each iteration, and when each is planned, from a start at which all planners are
    ready: idle ones first plan what they follow, and iterations are planned once training is `ahead` before them.
    """
    free_s = [0.0 if planner < FOLLOWED else follow_s for planner in range(options.planners)]
    begins: list[float] = []
    waits, spans = [], []
    for iteration in range(options.iterations):
        planner = iteration % options.planners
        is_open = 0.0 if iteration <= LEAST_AHEAD else spans[0][1] if iteration <= ahead else begins[iteration - ahead]
        begin = max(is_open, free_s[planner])
        end = begin + (first_s if iteration < FOLLOWED else plans_s[iteration % len(plans_s)])
        free_s[planner] = end + follow_s * (iteration < FOLLOWED <= iteration + options.planners)
        spans.append((begin, end))
        due = begins[-1] + options.seconds if begins else 0.0
        begins.append(max(due, end))
        waits.append(max(end - due, 0.0))
    return waits, spans


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
