"""Two nodes of a job as network namespaces: one is cut off or killed, the other goes on from the last checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.agents import DEADLINE_S, Nodes, kill
from tests.elastic.test_module_runs import assert_as_undisturbed, costs, script_of, trained
from tests.helpers.namespaces import ADDRESSES, inside, ip, two_nodes

__all__ = ["costs"]
EVERY = 4


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    with two_nodes() as names:
        yield names


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("event", ["killed", "cut off"])
def test_the_other_node_goes_on(
    namespaces: tuple[str, str], costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "link0")
    flags = ("--last-call", "20", "--emergency-every", str(EVERY), "--rdzv-conf", "read_timeout=30")
    with Nodes(tmp_path, 29400, least=1, most=2, script=script_of(costs, tmp_path), host=ADDRESSES[0]) as nodes:
        stays, lost = (
            nodes.start(*flags, address=address, before=inside(name))
            for name, address in zip(namespaces, ADDRESSES, strict=True)
        )
        nodes.until(lambda: len(trained(nodes)) > EVERY or stays.poll() is not None, "iterations of two nodes")
        if event == "killed":
            kill(lost)
        else:
            ip(f"-n {namespaces[1]} link set link0 down")
        assert stays.wait(DEADLINE_S) == 0, nodes.said(0)[-3000:]
        assert lost.wait(DEADLINE_S) != 0, nodes.said(1)[-3000:]
        found = trained(nodes)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert_as_undisturbed(found, costs, tmp_path)
