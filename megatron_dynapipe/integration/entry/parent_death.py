"""A rank does not outlive its launcher, however that one ends."""

import os
import signal
import sys

from megatron_dynapipe.processes import set_parent_death_signal


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this rank when torchrun has ended, by SIGKILL too; Linux only.

    Nothing happens under another launcher: a rank that a shell started in the background may outlive the shell.

    Between the rank's start and this call torchrun may have ended already. Then the parent is another process by now,
    or was when it was first asked for; in that case the rank has no one to rendezvous with and ends by its timeout.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    set_parent_death_signal(signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
