"""What the campaign does to a run: faults that a run outlives, and last ones that it has to end with, by name.

A fault is a method of `Scene`; it is there where what it needs is (`needs`), at most so many times a run (`most`). What
it leaves disturbed for a while is put right by a timer, or by `calm`.
"""

import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
import redis

from benchmarks.faults.runs import Run
from megatron_dynapipe.store import StoreServer
from tests.store.servers import Relay

DISK = "size=16m"
"""Of the file system that logs and records are on."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What may be done: `act` on a scene. `said` is what the run has to end with; None where it goes on.

    A `last` fault lasts for the rest of the run.
    """

    act: Callable[["Scene"], None]
    needs: str = "run"
    most: int = 1000
    last: bool = False
    said: str | None = None


FAULTS: dict[str, Fault] = {}


def fault(
    needs: str = "run", most: int = 1000, last: bool = False, said: str | None = None
) -> Callable[[Callable[["Scene"], None]], Callable[["Scene"], None]]:
    """Enter a method under its name with hyphens."""

    def enter(act: Callable[["Scene"], None]) -> Callable[["Scene"], None]:
        FAULTS[act.__name__.replace("_", "-")] = Fault(act=act, needs=needs, most=most, last=last, said=said)
        return act

    return enter


@dataclass
class Scene:
    """A run with its store, disk and neighbour, until the block ends.

    Attributes:
        has: what faults may need: "run", "own" or "shared" (the store), "disk", "other" (a second job).
        counts: faults so far.
    """

    folder: Path
    data: Path
    choose: random.Random
    has: set[str]
    flags: str
    counts: Counter[str] = field(default_factory=Counter)
    _timers: list[tuple[threading.Timer, Callable[[], None]]] = field(default_factory=list)
    _resources: ExitStack = field(default_factory=ExitStack)
    server: Any = None
    relay: Any = None
    other: Run | None = None

    def __enter__(self) -> Self:
        self.report = self.folder / "report"
        self.report.mkdir(parents=True)
        if "disk" in self.has:
            subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", self.report], check=True)
            self._resources.callback(subprocess.run, ["umount", "-l", self.report], check=True)
        flags = self.flags
        if "shared" in self.has:
            self.server = self._resources.enter_context(StoreServer())
            parts = urlsplit(self.server.address.url)
            assert parts.port is not None
            self.relay = Relay(parts.port)
            self._resources.callback(self.relay.close)
            file = self.folder / "url"
            file.write_text(self.server.address.url.replace(f":{parts.port}/", f":{self.relay.port}/"))
            flags += f" --dynapipe-store-url-file {file}"
        self.run = Run(self.folder, self.data, flags)
        self._resources.callback(end, self.run)
        if "other" in self.has:
            self.other = Run(self.folder / "other", self.data, flags)
            self._resources.callback(end, self.other)
        return self

    def __exit__(self, *_: object) -> None:
        self.calm()
        self._resources.close()

    def possible(self, *, last: bool) -> list[str]:
        """Names of what can be done now."""
        return [
            name
            for name, fault in FAULTS.items()
            if fault.needs in self.has and self.counts[name] < fault.most and fault.last == last
        ]

    def disturb(self, name: str) -> None:
        """Do it; what has ended by itself meanwhile cannot be disturbed."""
        with suppress(psutil.Error, redis.RedisError, IndexError):
            FAULTS[name].act(self)
            self.counts[name] += 1

    def calm(self) -> None:
        """Put right what is still disturbed."""
        for timer, undo in self._timers:
            timer.cancel()
            undo()
        self._timers.clear()

    def later(self, least: float, most: float, undo: Callable[[], None]) -> None:
        """Put something right after a while; doing it twice does no harm."""
        timer = threading.Timer(self.choose.uniform(least, most), undo)
        self._timers.append((timer, undo))
        timer.start()

    def planner(self) -> psutil.Process:
        return self.choose.choice(self.run.children("megatron_dynapipe.service"))

    def store_process(self) -> psutil.Process:
        if self.server is not None:
            return psutil.Process(self.server._guard.pid).children()[0]
        return self.run.children("valkey-server")[-1]

    @fault(most=1)
    def planner_killed(self) -> None:
        """A planner gets SIGKILL; nobody starts it again."""
        self.planner().kill()

    @fault()
    def planner_stopped(self) -> None:
        """A planner gets SIGSTOP, for 1 to 40 s."""
        stopped = self.planner()
        stopped.suspend()
        self.later(1, 40, lambda: resume(stopped))

    @fault(most=1, needs="own")
    def own_store_killed(self) -> None:
        """The run's own server gets SIGKILL; nobody starts it again."""
        self.store_process().kill()

    @fault(needs="shared")
    def shared_store_restarted(self) -> None:
        """A shared server gets SIGKILL, and comes back empty; connections are refused for up to 5 s."""
        self.relay.cut()
        self.store_process().kill()
        self.later(0, 5, self.connect)

    @fault()
    def store_stopped(self) -> None:
        """The server gets SIGSTOP, for 1 to 10 s."""
        stopped = self.store_process()
        stopped.suspend()
        self.later(1, 10, lambda: resume(stopped))

    @fault(needs="shared")
    def connections_dropped(self) -> None:
        """Every connection to the store is dropped."""
        self.relay.cut()
        self.connect()

    @fault(needs="shared")
    def connections_refused(self) -> None:
        """Every connection to the store is dropped, and refused for 1 to 8 s."""
        self.relay.cut()
        self.later(1, 8, self.connect)

    @fault(needs="shared")
    def connections_delayed(self) -> None:
        """Every message to and from the store takes 10 to 150 ms longer, for 5 to 15 s."""
        self.relay.delay_s = self.choose.uniform(0.01, 0.15)
        self.later(5, 15, self.hurry)

    @fault(needs="disk")
    def disk_full(self) -> None:
        """The disk of logs and records is full, for 2 to 15 s."""
        with suppress(OSError), (self.report / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self.later(2, 15, lambda: (self.report / "ballast").unlink(missing_ok=True))

    @fault(needs="other", most=1)
    def other_job_killed(self) -> None:
        """Every process of a second job on the same server gets SIGKILL."""
        assert self.other is not None
        for process in [*self.other.children(""), psutil.Process(self.other.process.pid)]:
            process.kill()

    @fault(needs="shared", last=True, said=r"the plan is damaged: [^\n]*")
    def plan_corrupted(self) -> None:
        """One bit changes of the plan that is furthest ahead."""
        with redis.Redis.from_url(self.server.address.url) as client:
            while len(keys := self._plans_ahead(client)) < self.ahead:
                if self.run.process.poll() is not None:
                    raise IndexError
                time.sleep(0.01)
            value = bytearray(client.xread({keys[-1]: "0-0"})[0][1][0][1][b"v"])
            value[len(value) // 2] ^= 1
            client.unlink(keys[-1])
            client.xadd(keys[-1], {b"v": bytes(value)}, id="1-1")

    @fault(needs="shared", last=True)
    def store_gone(self) -> None:
        """A shared server is stopped, and does not come back."""
        self.server.__exit__()

    @fault(last=True)
    def planners_killed_for_good(self) -> None:
        """Every planner gets SIGKILL."""
        for planner in self.run.children("megatron_dynapipe.service"):
            planner.kill()

    @fault(needs="shared", last=True)
    def plans_deleted(self) -> None:
        """Plans are deleted as soon as they are there, as by expiry or eviction."""
        with redis.Redis.from_url(self.server.address.url) as client:
            while self.run.process.poll() is None:
                for key in client.scan_iter("dynapipe:*:train:*:[0-9]:[0-9]"):
                    client.unlink(key)

    ahead = 6
    """Iterations that a run plans ahead, so that the last of them has not been fetched."""

    def _plans_ahead(self, client: Any) -> list[bytes]:
        """Stage 0's plans of this run beyond the iteration in training, in order."""
        ahead = {}
        for key in client.scan_iter("dynapipe:*:train:*:0:0"):
            parts = key.split(b":")
            reply = client.xread({b":".join([*parts[:3], b"train:progress"]): "0-0"})
            if reply and int(parts[4]) > int(reply[0][1][0][0].partition(b"-")[0]):
                ahead[int(parts[4])] = key
        return [ahead[iteration] for iteration in sorted(ahead)]

    def connect(self) -> None:
        self.relay.is_cut = False

    def hurry(self) -> None:
        self.relay.delay_s = 0.0


def resume(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.resume()


def end(run: Run) -> None:
    """Whatever is left of a run."""
    with suppress(psutil.Error):
        for process in run.children(""):
            process.kill()
    run.process.kill()
    run.process.wait()


def can_mount(folder: Path) -> bool:
    """Whether this user may make a small file system to fill."""
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=False, capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return done.returncode == 0
