"""Agents of `launch` over ranks that train nothing: who starts, saves and leaves when nodes come and go."""

import base64
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_dynapipe.elastic import rendezvous
from megatron_dynapipe.elastic.launch import MOST_FRUITLESS
from megatron_dynapipe.elastic.rendezvous import KEY_VARIABLE
from megatron_dynapipe.errors import ConfigError
from tests.elastic.agents import DEADLINE_S, TOY, Nodes, kill
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
    for node in (0, 1):
        assert "failed (exitcode" not in nodes.said(node), "a planned leave is no error"
    assert nodes.end() == [0, 0]


@pytest.mark.slow
def test_a_lost_rank_is_started_again_and_counted_and_a_lost_node_is_noticed(nodes: Nodes) -> None:
    # Of all nodes alike: who hears of the others less often than it expects takes them for lost.
    flags = ("--max-restarts", "2", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=8")
    nodes.start(*flags)
    nodes.await_starts(1)
    lost = nodes.start(*flags)
    nodes.await_starts(2)
    kill(lost)
    nodes.await_starts(1, rounds=2)
    assert "1 of 2 nodes are silent or have left" in nodes.said(0)
    nodes.signal_rank(0, signal.SIGKILL)
    nodes.await_starts(1, rounds=3)
    assert "a rank failed (status [-9])" in nodes.said(0)
    (nodes.folder / "end").touch()


@pytest.mark.slow
def test_a_notice_file_sends_the_node_away(nodes: Nodes) -> None:
    notice = nodes.folder / "notice"
    nodes.start()
    nodes.await_starts(1)
    going = nodes.start("--notice-file", str(notice))
    nodes.await_starts(2)
    notice.touch()
    assert going.wait(DEADLINE_S) == 0
    nodes.await_starts(1, rounds=2)
    assert nodes.log().count("save 0/2") == 1


def test_ranks_that_cannot_start_are_not_started_again(nodes: Nodes) -> None:
    (nodes.folder / "status-0").write_text("2")
    assert nodes.start().wait(DEADLINE_S) == 2
    assert nodes.log() == ["start 0/1"]
    assert all(" launch: " in line for line in nodes.said(0).splitlines()), "nothing of torch's log"


@pytest.mark.slow
def test_ranks_that_fail_before_their_first_iteration_are_not_started_for_ever(nodes: Nodes) -> None:
    (nodes.folder / "always-0").write_text("1")
    assert nodes.start().wait(DEADLINE_S) == 1
    assert nodes.log() == ["start 0/1"] * MOST_FRUITLESS
    assert "5 starts in a row failed before their first iteration (status [1])" in nodes.said(0)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["key", "command"])
def test_a_node_of_another_job_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    nodes.start()
    nodes.await_starts(1)
    folder = nodes.folder / "other"
    folder.mkdir()
    if other == "key":
        monkeypatch.setenv(KEY_VARIABLE, "another key for tests alone")
    intruder = Nodes(
        folder, nodes._port, least=1, most=3, script=[str(TOY), str(nodes.folder)] if other == "key" else ()
    )
    assert intruder.start().wait(DEADLINE_S) == 2
    assert "expected job 'dynapipe' at" in intruder.said(0)
    assert "to be signed with this node's key and to run this command, it is not" in intruder.said(0)
    assert nodes.end() == [0]


def listening(process: psutil.Process) -> set[str]:
    return {each.laddr.ip for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


def test_it_listens_at_the_address_of_its_endpoint_alone(nodes: Nodes) -> None:
    """It listened on all interfaces, although the endpoint was this machine's loopback."""
    agent = nodes.start(address=None)
    nodes.await_starts(1)
    assert listening(psutil.Process(agent.pid)) == {"127.0.0.1"}
    assert nodes.end() == [0]


def test_a_state_that_nobody_of_the_job_signed_is_not_unpickled(nodes: Nodes) -> None:
    """Whoever reached the port ran code as the user of the job."""
    proof = nodes.folder / "proof"
    attack = base64.b64encode(f"cposix\nsystem\n(S'touch {proof}'\ntR.".encode())  # a pickle that runs a command
    store = TCPStore("127.0.0.1", nodes._port, is_master=True, wait_for_workers=False)
    store.set("torch.rendezvous.dynapipe", attack)
    assert nodes.start().wait(DEADLINE_S) == 2
    assert "to be signed with this node's key" in nodes.said(0)
    assert not proof.exists()


def test_a_key_is_made_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = rendezvous.shared_key()
    assert len(key) == 64 and rendezvous.shared_key() == key
    (path,) = (tmp_path / "megatron-dynapipe").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="to be readable by its owner alone"):
        rendezvous.shared_key()
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="to have 16 characters or more, got 5"):
        rendezvous.shared_key()


@pytest.mark.slow
def test_the_node_whose_own_address_is_the_endpoint_hosts_the_rendezvous(nodes: Nodes) -> None:
    """Also where no name of this machine resolves to the address."""
    others = Nodes(nodes.folder, nodes._port, least=1, most=1, host="127.0.0.77")
    with others:
        agent = others.start(address="127.0.0.77")
        others.await_starts(1)
        assert listening(psutil.Process(agent.pid)) == {"127.0.0.77"}
        assert others.end() == [0]


BAD = {
    "nobody answers": (
        ["--rdzv-endpoint", "192.0.2.1:29400", "--join-timeout", "2"],
        "expected a rendezvous at 192.0.2.1:29400, and nobody answers there",
    ),
    "too few nodes": (
        ["--nnodes", "2:3", "--join-timeout", "2"],
        "expected at least 2 nodes of job 'dynapipe' at",
    ),
    "no nodes": (["--nnodes", "3:2"], "expected --nnodes MIN:MAX with 1 ≤ MIN ≤ MAX, got 3:2"),
    "no etcd": (["--rdzv-backend", "etcd-v2"], "pip install python-etcd"),
}
DAILY = ("no nodes",)
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
