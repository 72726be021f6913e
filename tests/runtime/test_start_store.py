"""What ranks agree on over the agent's store, before any process group."""

import os

import pytest
from torch.distributed import TCPStore

from megatron_dynapipe.core.errors import ConfigError, CostModelError, DynaPipeError
from megatron_dynapipe.runtime.start_store import from_rank_0, renew, says_first
from tests.helpers.processes import in_ranks, run_ranks
from tests.store.servers import free_port


@in_ranks(2)
def test_rank_0_makes_a_text_for_all_and_its_error_is_that_of_all(rank: int) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert from_rank_0("text", lambda: f"of {rank}", timeout_s=60) == "of 0"

    def fail(error: Exception) -> str:
        raise error

    for error, said in (
        (CostModelError("no costs", hint="measure"), "^no costs\nhint: measure$"),
        (ZeroDivisionError("by zero"), "^by zero$" if rank == 0 else "^rank 0 failed: ZeroDivisionError: by zero$"),
    ):
        with pytest.raises(type(error) if rank == 0 else ConfigError, match=said):
            from_rank_0(str(error), lambda error=error: fail(error), timeout_s=60)
    if rank == 1:
        with pytest.raises(DynaPipeError, match="waited 1 s for rank 0's nothing"):
            from_rank_0("nothing", str, timeout_s=1)


def first_to_say(rank: int, world_size: int) -> bool:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return says_first("what all say")


def test_one_rank_says_a_text_first() -> None:
    assert sorted(run_ranks(first_to_say, 2)) == [False, True]


def renewed(rank: int, world_size: int, shared: bool, stale: str) -> tuple[str, int]:
    """A text and a sum over process groups, in a store of this start, beside keys of the start before."""
    import torch
    import torch.distributed as dist

    os.environ |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": str(rank)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(shared)
    if shared and rank:
        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        agents.set(f"dynapipe/asks/{rank}", stale)  # of a rank that was killed
    if not shared:
        os.environ["MASTER_PORT"] = stale
    renew(60)
    text = from_rank_0("text", lambda: f"of {rank}", timeout_s=60)
    dist.init_process_group("gloo")
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return text, int(total)


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_that_count_their_starts_differently_meet_in_a_store_of_their_own(shared: bool) -> None:
    """torchrun counts the restarts of each node by itself, and keeps its store over them."""
    stale = "question of a killed rank" if shared else str(free_port())
    assert run_ranks(renewed, 3, {"shared": shared, "stale": stale}) == [("of 0", 6)] * 3


def test_a_rank_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port)}
    environment |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="rank 0 waited 1 s for the 2 ranks to meet: 1 of them came"):
        renew(1)
