"""How a rank ends that cannot start: one reports, the others wait to be ended. Imports no torch."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

GRACE_S = 5.0
"""torchrun ends the other ranks once one has failed; one that failed too waits for that, so as not to be first."""


def leave_report_to_another_rank(status: int) -> NoReturn:
    """Exit without a word once the rank that reports the error has had time to do so.

    torchrun ends this rank meanwhile, and lists every rank that a signal ended: this one ends well instead, so that
    its summary names the rank with the message alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(GRACE_S)
    sys.exit(status)


def write_error_file(message: str) -> None:
    """Give torchrun the message for its summary, below its own traceback, which no worker can keep away.

    It ends with a ChildFailedError whenever a worker's status is not 0, and says there what error files hold.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": details}), encoding="utf-8")
