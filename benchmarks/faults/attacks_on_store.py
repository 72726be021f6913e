"""Attacks on the plan store, on planners, and on the password."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import redis
from ground import ITERATIONS, Ground, Outcome, Run, attack

from megatron_dynapipe.store import StoreServer
from tests.store.servers import Relay

FINISHED = rf"{ITERATIONS} iterations, [\d,]+ tokens per second"


@attack
def store_stands_still(ground: Ground) -> Outcome:
    """The plan store's server is stopped for 25 s, then goes on."""
    run = Run(ground)
    run.at(4)
    server = run.children("valkey-server")[-1]
    server.suspend()
    time.sleep(25)
    server.resume()
    return run.outcome(ground, FINISHED, status=0)


@attack
def store_killed(ground: Ground) -> Outcome:
    """The server of the run's own gets SIGKILL; it starts again, empty."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    run.children("valkey-server")[-1].kill()
    return run.outcome(ground, FINISHED, status=0)


@attack
def store_gone_for_good(ground: Ground) -> Outcome:
    """A shared server is stopped and not started again."""
    with StoreServer() as server:
        run = Run(ground, f"--dynapipe-store-url-file {url_file(ground, server.address.url)} --dynapipe-lookahead 2")
        run.at(4)
    return run.outcome(ground, r"plan store redis://\S+ failed while [^\n]*", status=1)


@attack
def connections_dropped(ground: Ground) -> Outcome:
    """Every connection to the store is dropped three times, and refused for a second."""
    with StoreServer() as server, relayed(server) as (relay, url):
        run = Run(ground, f"--dynapipe-store-url-file {url_file(ground, url)} --dynapipe-lookahead 2")
        for iteration in (3, 6, 9):
            run.at(iteration)
            relay.cut()
            time.sleep(1)
            relay.is_cut = False
        return run.outcome(ground, FINISHED, status=0)


@attack
def connections_slow(ground: Ground) -> Outcome:
    """Every message to and from the store takes 100 ms."""
    with StoreServer() as server, relayed(server, delay_s=0.1) as (_, url):
        run = Run(ground, f"--dynapipe-store-url-file {url_file(ground, url)}")
        return run.outcome(ground, FINISHED, status=0)


@attack
def plan_corrupted(ground: Ground) -> Outcome:
    """One bit of a plan in the store changes."""
    with StoreServer() as server:
        url = server.address.url
        run = Run(ground, f"--dynapipe-store-url-file {url_file(ground, url)} --dynapipe-lookahead 6")
        run.at(3)
        with redis.Redis.from_url(url) as client:
            key = max(client.scan_iter("dynapipe:*:train:*:0:0"), key=lambda key: int(key.split(b":")[4]))
            value = bytearray(client.xread({key: "0-0"})[0][1][0][1][b"v"])
            value[len(value) // 2] ^= 1
            client.unlink(key)
            client.xadd(key, {b"v": bytes(value)}, id="1-1")
        return run.outcome(ground, r"the plan is damaged: [^\n]*", status=1)


@attack
def two_jobs(ground: Ground) -> Outcome:
    """Two runs share a server; the other one is killed."""
    with StoreServer() as server:
        flags = f"--dynapipe-store-url-file {url_file(ground, server.address.url)}"
        run, other = Run(ground, flags), Run(ground, flags)
        other.at(3)
        for process in [*other.children(""), psutil.Process(other.process.pid)]:
            process.kill()
        other.process.wait()
        return run.outcome(ground, FINISHED, status=0)


def url_file(ground: Ground, url: str) -> Path:
    file = ground.fresh() / "url"
    file.write_text(url)
    return file


@contextmanager
def relayed(server: StoreServer, *, delay_s: float = 0.0) -> Iterator[tuple[Relay, str]]:
    """A server behind a relay, and its URL there."""
    port = urlsplit(server.address.url).port
    assert port is not None
    relay = Relay(port, delay_s=delay_s)
    try:
        yield relay, server.address.url.replace(f":{port}/", f":{relay.port}/")
    finally:
        relay.close()


@attack
def plans_expire(ground: Ground) -> Outcome:
    """A shared server loses a job's plans, as by expiry or eviction."""
    with StoreServer() as server:
        file = url_file(ground, server.address.url)
        run = Run(ground, f"--dynapipe-store-url-file {file} --dynapipe-lookahead 2 --dynapipe-timeout-s 15")
        run.at(4)
        with redis.Redis.from_url(server.address.url) as client:
            while run.process.poll() is None:
                for key in client.scan_iter("dynapipe:*:train:*:[0-9]:[0-9]"):
                    client.unlink(key)
        return run.outcome(ground, r"the key may have expired, or been evicted", status=1)


@attack
def planner_killed(ground: Ground) -> Outcome:
    """The planner process gets SIGKILL; it starts again."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    run.children("megatron_dynapipe.service")[-1].kill()
    return run.outcome(ground, FINISHED, status=0)


@attack
def planner_killed_again_and_again(ground: Ground) -> Outcome:
    """Every planner process gets SIGKILL as soon as it runs."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    while run.process.poll() is None:
        for planner in run.children("megatron_dynapipe.service"):
            with suppress(psutil.NoSuchProcess):
                planner.kill()
        time.sleep(0.1)
    return run.outcome(ground, r"planner \d failed while running: its process \d+ ended with exit status -9", status=1)


@attack
def planner_stopped(ground: Ground) -> Outcome:
    """The planner process gets SIGSTOP and never goes on; rank 0 starts a stand-in."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    run.children("megatron_dynapipe.service")[-1].suspend()
    return run.outcome(ground, FINISHED, status=0)


@attack
def password_given(ground: Ground) -> Outcome:
    """A store's password is given in a file; it is looked for in every file that the run leaves, and in ps."""
    with StoreServer() as server:
        file = url_file(ground, server.address.url)
        folder = ground.fresh()
        run = Run(ground, f"--dynapipe-store-url-file {file} --save {folder} --save-interval 5")
        run.at(2)
        shown = b"".join(Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in run.children(""))
        outcome = run.outcome(ground, FINISHED, status=0)
        password = server.address.url.partition("://:")[2].partition("@")[0].encode()
        left = [path for root in (folder, run.folder) for path in root.rglob("*") if path.is_file()]
        holding = [path.name for path in left if password in path.read_bytes()] + ["ps"] * (password in shown)
    trouble = outcome.trouble or (f"the password is in {', '.join(holding)}" if holding else "")
    said = f"the password is in none of {len(left)} files, nor in ps"
    return Outcome(said=said, seconds=outcome.seconds, status=outcome.status, losses=outcome.losses, trouble=trouble)
