"""What all ranks agree on: one text, one failure, one plan, one dataset, one set of settings."""

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import DynaPipeError, InfeasibleError, PlanError, PlannerFailedError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CPU_RATES, ModelShape
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, SplitSettings
from tests.helpers.processes import RanksFailedError, in_ranks, run_ranks
from tests.helpers.random_dataset import make_dataset
from tests.helpers.settings import settings_in_layers
from tests.helpers.waiting import until


def _control():
    import torch.distributed as dist

    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo")
    return ControlGroup(timeout_s=20)


@in_ranks(3)
def test_what_all_ranks_agree_on(rank):
    """One text; each its own value, or the lowest failing rank's error, by its name; one plan."""
    control = _control()
    assert [control.broadcast_text(f"{rank} ü" * rank, source=source) for source in (0, 2)] == ["", "2 ü2 ü"]

    def fail(error: Exception | None, ranks: list[int]) -> int:
        if rank in ranks:
            raise error
        return rank

    assert control.run_on_all(lambda: fail(None, [])) == rank
    by = "" if rank == 1 else "rank 1: "
    with pytest.raises(InfeasibleError, match=f"^{by}too large\nhint: less$"):
        control.run_on_all(lambda: fail(InfeasibleError("too large", hint="less"), [1, 2]))
    with pytest.raises(OSError if rank == 1 else PlannerFailedError, match=f"^{by and 'rank 1: OSError: '}full$"):
        control.run_on_all(lambda: fail(OSError("full"), [1]))
    control.start_agreement(None, plan=SAME, what="iteration 4").settle()
    said = (
        "expected one plan of iteration 4 on all ranks: the digest of its plan is 0123456789abcde… on rank 0 and "
        "fedcba987654321… on rank 2"
    )
    with pytest.raises(PlanError, match=said):
        control.start_agreement(None, plan=OTHER if rank == 2 else SAME, what="iteration 4").settle()


@in_ranks(7)
def test_groups_of_groups_carry_what_one_group_would(rank):
    """Seven ranks in pairs, pairs of pairs and one above: the last pair lacks its second rank."""
    import torch

    from megatron_dynapipe.runtime import control_group

    control_group.WIDTH = 2
    control, ranks = _control(), range(7)
    assert len(control.groups) == [3, 1, 2, 1, 3, 1, 1][rank]
    texts = [control.broadcast_text(f"{rank} ü" * rank, source=source) for source in ranks]
    assert texts == [f"{source} ü" * source for source in ranks]
    assert control.gather_texts("x" * rank) == ["x" * other for other in ranks]
    assert control.collect(b"y" * rank) == ([b"y" * other for other in ranks] if rank == 0 else [])
    rows = control.start_gather(torch.tensor([[rank, 0.5]]))
    total = control.start_sum(torch.tensor([rank, 2], dtype=torch.int32))
    assert total().tolist() == [21, 14]
    assert [row.tolist() for row in rows()] == [[[other, 0.5]] for other in ranks]
    assert [int(value) for value in control.gather(torch.tensor(rank))] == list(ranks)
    agreement = control.start_agreement(OSError("full") if rank == 5 else None)
    with pytest.raises(OSError if rank == 5 else PlannerFailedError, match="full"):
        agreement.settle()
    control.start_agreement(None).settle()
    control.close()


def _lose_a_rank(*, rank: int, world_size: int, lost: int, is_killed: bool, folder: str) -> None:
    import torch.distributed as dist

    from megatron_dynapipe.runtime import control_group

    control_group.WIDTH = 2
    dist.init_process_group("gloo")
    control = control_group.ControlGroup(timeout_s=600 if is_killed else 3)
    control.start_agreement(None).settle()
    others = [Path(folder, f"{other} was told") for other in range(world_size) if other != lost]
    if rank != lost:
        with pytest.raises(RuntimeError):
            control.start_agreement(None).settle()
        Path(folder, f"{rank} was told").touch()
    elif is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    until(lambda: all(file.exists() for file in others), 20)  # none ends before every other is told


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "hanging"])
@pytest.mark.parametrize("lost", [3, 4, 0], ids=["second of a pair", "first of a pair of pairs", "first of all"])
def test_a_lost_rank_ends_the_others_in_whatever_group_they_are(tmp_path, lost, is_killed):
    """A killed one at once, long before the deadline; one that hangs at the deadline."""
    with pytest.raises(RanksFailedError, match="exit code -9") if is_killed else nullcontext():
        run_ranks(_lose_a_rank, 7, {"lost": lost, "is_killed": is_killed, "folder": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 6


SAME, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2
DIFFERENCES = [
    # what rank 0 and rank 1 hold, and what is found
    (({"a": "1", "b": "ü"}, {"a": "1", "b": "ü"}), ""),
    (({"a": "1", "b": "2"}, {"a": "1", "b": "3"}), "b 2 on rank 0 and 3 on rank 1"),
    (({"b": "2", "a": "1"}, {"a": "9", "b": "3"}), "a 1 on rank 0 and 9 on rank 1, b 2 on rank 0 and 3 on rank 1"),
    (({}, {"a": "1"}), ""),
    (({}, {}), ""),
]


@in_ranks(2)
def test_the_fields_in_which_ranks_differ_are_the_same_on_all(rank):
    from megatron_dynapipe.megatron.supply import same_flags

    control = _control()
    for fields, said in DIFFERENCES:
        assert same_flags.difference(fields[rank], control) == said


def _same_runs(*, rank: int, world_size: int, cases: list[tuple[list[str], list[int], str]]) -> None:
    import argparse

    from megatron_dynapipe.megatron.supply.agreement import check_same_run

    os.environ["LOCAL_RANK"] = "0"  # each is a node of its own
    control = _control()
    shape = ModelShape(family=ModelFamily.GPT, hidden=32, heads=2, kv_channels=16, ffn=64, vocabulary=512)
    for folders, seeds, said in cases:
        draw = {"seed": seeds[rank], "samples_per_iteration": 4, "max_input_length": 80}
        sampler = SamplerSettings(family=ModelFamily.GPT, **draw)
        inputs = PlanInputs(
            data_folder=folders[rank],
            splits=(SplitSettings(name="train", sampler=sampler),),
            planner=settings_in_layers(ModelFamily.GPT, 2, hidden_size=32, memory_limit_bytes=10**9),
            costs=AnalyticCosts(shape=shape, rates=CPU_RATES, max_size=4, max_length=128),
        )
        with pytest.raises(DynaPipeError, match=said) if said else nullcontext():
            check_same_run(control, argparse.Namespace(data=Path(folders[rank]), files={}), inputs)


def test_nodes_with_other_data_of_equal_lengths_or_other_settings_do_not_train(tmp_path):
    """The lengths are the same, so that the plans of other data are."""
    first = make_dataset(tmp_path / "first")
    copied, changed = (str(shutil.copytree(first, tmp_path / name)) for name in ("copied", "changed"))
    content = Path(changed, "train.bin").read_bytes()
    Path(changed, "train.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    first, settings = (
        str(first),
        "expected the same settings on all ranks: splits.train.sampler.seed 1 on rank 0 and",
    )
    cases = [
        ([first, copied], [1, 1], ""),
        ([first, changed], [1, 1], "expected the same dataset on all nodes: the digest of train.bin "),
        ([first, copied], [1, 2], f"{settings} 2 on rank 1"),
    ]
    run_ranks(_same_runs, 2, {"cases": cases})
