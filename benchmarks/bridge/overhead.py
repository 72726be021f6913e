"""What the executor costs inside Megatron-Bridge: iterations of its loop as planned and by its own schedule, in turn.

    make test-bridge    # makes the environment, .venv-bridge
    OMP_NUM_THREADS=1 .venv-bridge/bin/python -m benchmarks.bridge.overhead [--pairs 100]

Both run the same micro-batches, padded rows of one shape, through the same model of one stage and the same step
function, and finalize gradients. Devices are rehearsed on the CPU (`tests/helpers/rehearsal`), and what is measured is
the process's processor time, to which other work on the machine adds little. Printed: the ratio of times, planned over
Bridge's, with a 95% confidence interval from resampling the pairs, and the median times.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import in_turns, interval, show_interval
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs

WARM_UP = 5
SAMPLES = 15
"""Of an iteration: plans make five micro-batches of three, which fit the memory that they are given."""
PADDED = {"micro_batch_layouts": ["padded"], "slices": "off", "split_backward": "off"}
RUNS = "tests.helpers.bridge_runs"


def processor_seconds(call: Callable[[], object]) -> float:
    """Of all threads of this process, during a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


@contextlib.contextmanager
def second_iteration_in_turns(
    pairs: int, *, length: int, timed: Callable[[Callable[[], object]], float], warm_up: int = WARM_UP
) -> Iterator[dict[str, Any]]:
    """For the length of a block, the second planned iteration of a run is repeated: as planned, and by Megatron's own
    schedule without pipelining, which Bridge calls without a plan.

    Args:
        pairs: timed iterations of each.
        length: tokens of the longest sample.
        timed: seconds of a call.
        warm_up: iterations of each before them.

    Yields:
        A dictionary that gets `seconds`, float[pairs, 2], planned last, and `shapes` of the micro-batches.
    """
    import torch
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    from megatron_dynapipe.megatron.execution.iterations import IterationRunner

    run_entry = IterationRunner.run
    result: dict[str, Any] = {}

    def run(self: IterationRunner, entry: Any, host: Any, models: Sequence[Any], step: Any, **keywords: Any) -> Any:
        """An iteration of the loop; in its second one, the pairs."""
        if entry.iteration == 1:
            count = len(entry.micro_batches)
            hosts = [host(index) for index in range(count)]
            batches = [self.make_batch(micro_batch, torch.device("cpu")) for micro_batch in hosts]

            def by_plan() -> None:
                run_entry(self, entry, hosts.__getitem__, models, step, **keywords)

            def by_bridge() -> None:
                forward_backward_no_pipelining(
                    forward_step_func=step,
                    data_iterator=iter([dict(batch) for batch in batches]),
                    model=list(models),
                    num_microbatches=count,
                    seq_length=length,
                    micro_batch_size=1,
                    forward_only=False,
                )

            in_turns(by_bridge, by_plan, warm_up)
            result["seconds"] = in_turns(by_bridge, by_plan, pairs, timed=timed).tolist()
            result["shapes"] = [str(row.shape) for row in entry.micro_batches]
            for chunk in models:
                chunk.zero_grad_buffer()
        return run_entry(self, entry, host, models, step, **keywords)

    IterationRunner.run = run
    try:
        yield result
    finally:
        IterationRunner.run = run_entry


def measure(*, rank: int, world_size: int, model: str, dataset: str, pairs: int) -> dict[str, Any]:
    """On the only rank: what `second_iteration_in_turns` yields.

    Args:
        rank: 0.
        world_size: 1.
        model: a HuggingFace folder.
        dataset: of samples of one length.
        pairs: timed iterations of each.
    """
    import torch
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megatron_dynapipe.bridge import planned
    from tests.helpers.bridge_forced import forcing
    from tests.helpers.bridge_runs import recipe
    from tests.helpers.bridge_samples import LENGTH

    torch.cuda.set_device(rank)
    config = recipe(Path(model), iterations=2)
    config.train.global_batch_size = SAMPLES
    with (
        second_iteration_in_turns(pairs, length=LENGTH, timed=processor_seconds) as result,
        planned(config, dataset, memory_limit_mb=6.0, report_folder=f"{dataset}-report") as run,
    ):
        run.host._inputs_of = partial(forcing, run.host._inputs_of, PADDED)  # as Bridge's schedule runs them, too
        pretrain(config=config, forward_step_func=forward_step)
    return result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, metavar="N", help="timed iterations of each (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_dataset(folder / "data", 64, lengths=(47, 48), target=2)
        given = {"model": str(folder / "llama"), "dataset": str(folder / "data"), "pairs": options.pairs}
        runs = [
            jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": ["llama"]}, 1),
            jobs.Job("benchmarks.bridge.overhead:measure", given, 1),
        ]
        prepared, measured = jobs.run_all(runs, folder, engine=True, preloaded=RUNS)
    for result in (prepared, measured):
        if isinstance(result, str):
            raise SystemExit(result)
    (found,) = measured
    medians = [sorted(times)[len(times) // 2] * 1e3 for times in zip(*found["seconds"], strict=True)]
    ratio = interval(found["seconds"])
    print(json.dumps({"shapes": found["shapes"], "bridge_ms": medians[0], "planned_ms": medians[1], "ratio": ratio}))
    print(f"planned over Bridge's schedule: {show_interval(ratio)}", file=sys.stderr)


if __name__ == "__main__":
    main()
