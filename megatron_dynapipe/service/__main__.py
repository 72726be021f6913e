"""The planner process: `python -m megatron_dynapipe.service`, its settings in one line on stdin.

stdin stays open: when it ends, the trainer is gone, and so is the planner. Exit status: 0 all planned or trainer gone,
1 an error (published for the ranks, traceback on stderr), 2 unusable settings, 143 ended by SIGTERM.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.service.client import PlannerFailure, publish_failure
from megatron_dynapipe.service.loop import PlannedSplits, PlannerLoop
from megatron_dynapipe.service.recalibration import MemoryBoundPlanner, Recalibrated
from megatron_dynapipe.service.settings import ServiceSettings, decode_settings
from megatron_dynapipe.store import PlanStore

_NICE = 10
"""Below the threads of training: a plan is needed in some iterations, theirs are needed now."""


def main() -> int:
    """Read settings, plan until done; the exit status."""
    os.nice(_NICE)
    logging.basicConfig(level=logging.INFO, format="planner: %(message)s")
    try:
        settings = decode_settings(sys.stdin.buffer.readline())
    except ConfigError as error:
        print(f"planner: {error}", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    signal.signal(signal.SIGTERM, _end)
    plan_all(settings)
    return 0


def plan_all(settings: ServiceSettings) -> None:
    """Plan everything `settings` asks for; errors are published, then raised."""
    with settings.open_store(is_known=True) as store:
        try:
            source = PlannedSplits(settings.inputs, training_planner(settings, store))
        except Exception as error:
            failure = PlannerFailure.of(error, planner=settings.planner, doing="reading lengths and costs")
            publish_failure(store, settings.keys, failure)
            raise
        PlannerLoop(settings, source, store).run()


def training_planner(settings: ServiceSettings, store: PlanStore) -> Callable[[int], MemoryBoundPlanner] | None:
    """The planner of each training iteration, where costs are corrected while training."""
    if settings.recalibration is None:
        return None
    inputs = settings.inputs
    return Recalibrated(
        inputs.planner,
        inputs.costs.load(),
        settings.recalibration,
        store,
        settings.keys,
        deadline_s=settings.idle_timeout_s,
    ).planner


def _end_with_trainer() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
