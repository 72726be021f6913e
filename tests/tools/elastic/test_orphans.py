"""A rank whose launcher was killed does not train on as an orphan."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.waiting import until

LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
time.sleep(60)
"""
RANK = """
import sys, time
from megatron_dynapipe.processes import end_with_launcher
end_with_launcher()
open(sys.argv[1] if len(sys.argv) > 1 else {ready!r}, "w").close()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_ends_with_torchrun_and_with_no_other_parent(tmp_path: Path, by_torchrun: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    ready = tmp_path / "ready"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK.format(ready=str(ready))],
        env=environment | ({"TORCHELASTIC_RUN_ID": "none"} if by_torchrun else {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        until(ready.exists)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        if by_torchrun:
            psutil.wait_procs([rank], timeout=10)
            assert not rank.is_running()
        else:
            time.sleep(0.5)
            assert rank.is_running()
    finally:
        launcher.kill()
        launcher.stdout.close()
        if rank.is_running():
            rank.kill()
