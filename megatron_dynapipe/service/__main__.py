"""The planner process: `python -m megatron_dynapipe.service`, its settings in one line on stdin.

stdin stays open: when it ends, the trainer is gone, and so is the planner. On a server that others share it stays until
then, and deletes what it has published. Exit status: 0 all planned or trainer gone, 1 an error (published for the
ranks, traceback on stderr), 2 unusable settings, 143 ended by SIGTERM.
"""

import logging
import os
import signal
import sys
import threading
import time
from types import FrameType

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.service.failure import describe_failure, publish_failure
from megatron_dynapipe.service.loop import PlannerLoop
from megatron_dynapipe.service.over_rows import ComparedSplits
from megatron_dynapipe.service.settings import ServiceSettings, decode_settings
from megatron_dynapipe.store import open_store

_NICE = 10
"""Below the threads of training: a plan is needed in some iterations, theirs are needed now."""
_END_S = 8.0
"""How long it may take to end by itself: less than `process.STOP_TIMEOUT_S`."""


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
    with open_store(settings.store, retention_s=settings.retention_s) as store:
        try:
            source = ComparedSplits(settings.inputs)
        except Exception as error:
            failure = describe_failure(error, who=f"planner {settings.planner}", doing="reading lengths and costs")
            publish_failure(store, settings.keys, failure)
            raise
        loop = PlannerLoop(settings, source, store)
        try:
            loop.run()
            while settings.retention_s is not None:
                time.sleep(1.0)  # training needs the plans until it ends, and ends this process
        except SystemExit:  # the run's clean end
            loop.close()
            raise


def _end_with_trainer() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # deletes this planner's plans
    time.sleep(_END_S)
    os._exit(0)


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # both the trainer and the end of stdin may send it: plans are being deleted
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
