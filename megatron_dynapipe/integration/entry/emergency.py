"""Emergency checkpoints of Megatron's loop, as near to each other as their share of the time allows.

signals_received   every rank, after every iteration, before Megatron asks whether it is to save
iteration           …  49 ── 50 ───── 51 ── 52  …        the one after a save is longer by it
                              save │
                                   rank 0 tells `--non-persistent-save-interval` from now on
"""

import time
from typing import Any

from megatron_dynapipe.elastic.pace import SavePace
from megatron_dynapipe.integration.entry import launch


def keep_pace() -> None:
    """From the first save on, set Megatron's interval by what saves and iterations take."""
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    received, pace = DistributedSignalHandler.signals_received, EmergencyPace()

    def signals_received(handler: DistributedSignalHandler) -> Any:
        heard = received(handler)
        pace.after_iteration()
        return heard

    DistributedSignalHandler.signals_received = signals_received


class EmergencyPace:
    """Times iterations, and with them the saves between two of them."""

    def __init__(self) -> None:
        self._pace = SavePace()
        self._last: float | None = None
        self._saves = False

    def after_iteration(self) -> None:
        """Take note of an iteration; every rank calls it."""
        from megatron.training import get_args

        args, now = get_args(), time.monotonic()
        iteration: int = args.curr_iteration + 1
        if self._last is not None:
            if self._saves:
                self._agree(args, iteration, now - self._last)
            else:
                self._pace.trained(now - self._last)
        self._last = now
        lasting = args.save_interval and iteration % args.save_interval == 0
        self._saves = not lasting and iteration % args.non_persistent_save_interval == 0

    def _agree(self, args: Any, iteration: int, seconds: float) -> None:
        """Take rank 0's interval, by an iteration and the save before it."""

        def decide() -> str:
            if self._pace.saved(max(seconds - self._pace.iteration_s, 0.0)):
                print(self._pace, flush=True)
            return str(self._pace.every)

        found = launch.from_rank_0(f"emergency-{iteration}", decide, timeout_s=args.dynapipe_timeout_s)
        args.non_persistent_save_interval = int(found)
