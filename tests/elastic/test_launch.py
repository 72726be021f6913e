"""Agents of `launch` over ranks that train nothing: who starts, saves and leaves when nodes come and go."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from megatron_dynapipe.elastic import rendezvous
from megatron_dynapipe.elastic.agent import MOST_FRUITLESS
from megatron_dynapipe.errors import ConfigError
from tests.elastic.agents import DEADLINE_S, TOY, Nodes
from tests.store.servers import free_port


@pytest.fixture
def nodes(tmp_path):
    with Nodes(tmp_path, free_port(), least=1, most=3) as nodes:
        yield nodes


def test_ranks_save_when_a_node_joins_and_when_it_leaves(nodes: Nodes) -> None:
    nodes.start()
    nodes.await_starts(1)
    joined = nodes.start()
    nodes.await_starts(2)
    assert nodes.log()[:2] == ["start 0/1", "save 0/1"]
    joined.send_signal(signal.SIGUSR1)
    assert joined.wait(DEADLINE_S) == 0
    nodes.await_starts(1, rounds=2)
    assert sorted(nodes.log()[4:6]) == ["save 0/2", "save 1/2"]
    assert "this node leaves the job" in nodes.said(1)
    assert nodes.end() == [0, 0]


@pytest.mark.slow
def test_a_lost_rank_is_started_again_and_counted_and_a_lost_node_is_noticed(nodes: Nodes) -> None:
    # Of all nodes alike: who hears of the others less often than it expects takes them for lost.
    flags = ("--max-restarts", "2", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=8")
    nodes.start(*flags)
    nodes.await_starts(1)
    lost = nodes.start(*flags)
    nodes.await_starts(2)
    for process in [*psutil.Process(lost.pid).children(recursive=True), psutil.Process(lost.pid)]:
        process.kill()
    nodes.await_starts(1, rounds=2)
    assert "1 of 2 nodes are silent or have left" in nodes.said(0)
    nodes.signal_rank(0, signal.SIGKILL)
    nodes.await_starts(1, rounds=3)
    assert "a rank failed (status [-9])" in nodes.said(0)
    (nodes.folder / "end").touch()


@pytest.mark.slow
def test_a_machine_list_sends_a_node_away_and_calls_it_back(nodes: Nodes) -> None:
    machines = nodes.folder / "machines"
    machines.write_text("one slots=1\ntwo # spare\n")
    for name in ("one", "two"):
        nodes.start("--machine-list", str(machines), "--node-name", name)
    nodes.await_starts(2)
    machines.write_text("one\n")
    nodes.await_starts(1)
    machines.write_text("one\ntwo:1\n")
    nodes.await_starts(2, rounds=2)
    assert nodes.end() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--notice-file", "--preemption-command"])
def test_a_notice_of_the_cloud_sends_the_node_away(nodes: Nodes, source: str) -> None:
    notice = nodes.folder / "notice"
    nodes.start()
    nodes.await_starts(1)
    going = nodes.start(source, str(notice) if source == "--notice-file" else f"test -e {notice}")
    nodes.await_starts(2)
    notice.touch()
    assert going.wait(DEADLINE_S) == 0
    nodes.await_starts(1, rounds=2)
    assert nodes.log().count("save 0/2") == 1


def test_ranks_that_cannot_start_are_not_started_again(nodes: Nodes) -> None:
    (nodes.folder / "status-0").write_text("2")
    assert nodes.start().wait(DEADLINE_S) == 2
    assert nodes.log() == ["start 0/1"]


@pytest.mark.slow
def test_ranks_that_fail_before_their_first_iteration_are_not_started_for_ever(nodes: Nodes) -> None:
    (nodes.folder / "always-0").write_text("1")
    assert nodes.start().wait(DEADLINE_S) == 1
    assert nodes.log() == ["start 0/1"] * MOST_FRUITLESS
    assert "5 starts in a row failed before their first iteration (status [1])" in nodes.said(0)


@pytest.mark.slow
def test_a_slow_node_is_left_out_at_the_next_change(nodes: Nodes) -> None:
    nodes.start()
    nodes.await_starts(1)
    slow = nodes.start()
    nodes.await_starts(2)
    (folder,) = {Path(path.decode().partition("=")[2]) for path in _slow_folders(slow)}
    (folder / "slow").write_text("rank 1 takes 3.0 of the median time")
    nodes.signal_rank(0, signal.SIGTERM)
    assert slow.wait(DEADLINE_S) == 0
    nodes.await_starts(1, rounds=2)
    assert "left out as slow: rank 1 takes 3.0" in nodes.said(1)


def _slow_folders(agent: subprocess.Popen) -> list[bytes]:
    """From the environment of an agent's rank."""
    import msgspec

    (rank,) = psutil.Process(agent.pid).children()
    job = msgspec.json.decode(rank.environ()["MEGATRON_DYNAPIPE_LAUNCH"])
    return [f"slow={Path(job['slow_file']).parent}".encode()]


@pytest.mark.slow
def test_another_job_of_the_same_id_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    nodes.start()
    nodes.await_starts(1)
    other = nodes.folder / "other"
    other.mkdir()
    intruder = Nodes(other, nodes._port, least=1, most=3)
    assert intruder.start().wait(DEADLINE_S) == 2
    assert "expected the job 'dynapipe' to be this one, toy_ranks.py with arguments of digest" in intruder.said(0)
    assert nodes.end() == [0]


@pytest.mark.parametrize(
    ("endpoint", "local_addr", "is_host"),
    [
        ("192.0.2.7:29400", "192.0.2.7", "true"),  # an address that no name of this machine resolves to
        ("192.0.2.7:29400", "192.0.2.8", None),
        ("127.0.0.1:29400", "127.0.0.1", None),  # torch finds out, and lets the second node here join
    ],
)
def test_the_node_whose_own_address_is_the_endpoint_hosts_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, local_addr: str, is_host: str | None
) -> None:
    asked: list[RendezvousParameters] = []

    def get_handler(parameters: RendezvousParameters) -> None:
        asked.append(parameters)
        raise RendezvousConnectionError

    monkeypatch.setattr(rendezvous, "get_rendezvous_handler", get_handler)
    with pytest.raises(ConfigError, match="and nobody answers there"):
        rendezvous.open_rendezvous(
            RendezvousParameters("c10d", endpoint, "id", min_nodes=1, max_nodes=2, local_addr=local_addr)
        )
    assert asked[0].config.get("is_host") == is_host


BAD = {
    "nobody answers": (
        ["--rdzv-endpoint", "192.0.2.1:29400", "--join-timeout", "2"],
        "expected a rendezvous at 192.0.2.1:29400, and nobody answers there",
    ),
    "too few nodes": (
        ["--nnodes", "2:3", "--join-timeout", "2"],
        "expected at least 2 nodes of job 'dynapipe' at",
    ),
    "no machine list": (["--machine-list", "/nowhere"], "expected a machine list at /nowhere: No such file"),
    "not in the machine list": (
        ["--machine-list", str(TOY), "--node-name", "this", "--join-timeout", "1"],
        "to name this machine (this)",
    ),
    "no command": (["--preemption-command", "'"], "expected --preemption-command to be a command"),
    "no nodes": (["--nnodes", "3:2"], "expected --nnodes MIN:MAX with 1 ≤ MIN ≤ MAX, got 3:2"),
    "no etcd": (["--rdzv-backend", "etcd-v2"], "pip install python-etcd"),
    "no factor": (["--exclude-slow", "0.5"], "expected --exclude-slow to be above 1, got 0.5"),
}
DAILY = ("no machine list", "no nodes")
ROWS = [pytest.param(*row, id=name, marks=() if name in DAILY else pytest.mark.slow) for name, row in BAD.items()]


@pytest.mark.parametrize(("flags", "message"), ROWS)
def test_what_cannot_be_is_one_line_and_a_hint(tmp_path: Path, flags: list[str], message: str) -> None:
    words = [sys.executable, "-m", "megatron_dynapipe", "launch", "--nproc-per-node", "1"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    ended = subprocess.run(
        [*words, *flags, TOY, tmp_path], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 2
    assert message in ended.stderr and "Traceback" not in ended.stderr
