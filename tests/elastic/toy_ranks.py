"""A training script's stand-in for tests of agents: it trains nothing, but starts, saves, leaves and ends as ranks do.

    toy_ranks.py FOLDER

Every rank has a helper process that it needs to save, and appends lines to FOLDER/log. SIGTERM to one makes all of its
round save and leave with status 75; FOLDER/end ends them all well; FOLDER/status-N ends the rank N with the status
written there, FOLDER/always-N every time that it starts.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LEFT = 75
folder, rank, world = Path(sys.argv[1]), os.environ["RANK"], os.environ["WORLD_SIZE"]
notice = folder / f"notice-{os.environ['MASTER_PORT']}"


def log(event: str) -> None:
    with (folder / "log").open("a") as file:
        file.write(f"{event} {rank}/{world}\n")


helper = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGTERM, lambda *_: notice.touch())
log("start")
(folder / f"pid-{rank}").write_text(str(os.getpid()))
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    if notice.exists():
        time.sleep(0.3)
        log("save" if helper.poll() is None else "helper ended")
        sys.exit(LEFT)
    if (folder / "end").exists():
        sys.exit(0)
    if (status := folder / f"status-{rank}").exists():
        wanted = int(status.read_text())
        status.unlink()
        sys.exit(wanted)
    if (always := folder / f"always-{rank}").exists():
        sys.exit(int(always.read_text()))
    time.sleep(0.05)
sys.exit(1)
