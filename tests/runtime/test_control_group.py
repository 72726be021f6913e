"""What all ranks agree on: one text, one failure, one plan, one dataset, one set of settings."""

import os
import shutil
from pathlib import Path

from megatron_dynapipe.cost import CPU_RATES, ModelShape
from megatron_dynapipe.errors import DynaPipeError, InfeasibleError, PlanError, PlannerFailedError
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service import AnalyticCosts, PlanInputs, SplitSettings
from megatron_dynapipe.units import ModelFamily
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset


def _control(function):
    import torch.distributed as dist

    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo")
    return function(ControlGroup(timeout_s=20))


def _fail_on(control, ranks: list[int], kind: str) -> str:
    def work() -> int:
        if control.rank in ranks:
            raise InfeasibleError("too large", hint="less") if kind == "ours" else OSError(f"disk of {control.rank}")
        return control.rank

    try:
        value = control.run_on_all(work)
    except Exception as error:  # noqa: BLE001  (the outcome under test)
        return f"{type(error).__name__}: {error}"
    return f"value {value}"


def _agreements(*, rank: int, world_size: int) -> dict[str, object]:
    def run(control) -> dict[str, object]:
        return {
            "texts": [control.broadcast_text(f"{rank} ü" * rank, source=source) for source in (0, 2)],
            "no failure": _fail_on(control, [], "ours"),
            "two fail": _fail_on(control, [1, 2], "ours"),
            "other kind": _fail_on(control, [1], "other"),
            "plans": [_agree(control, SAME), _agree(control, OTHER if rank == 2 else SAME)],
        }

    return _control(run)


def test_what_all_ranks_agree_on():
    """One text; each its own value, or the lowest failing rank's error, by its name; one plan."""
    ranks = run_ranks(_agreements, 3)
    said = (
        "expected one plan of iteration 4 on all ranks: the digest of its plan is 0123456789abcde… on rank 0 and "
        "fedcba987654321… on rank 2"
    )
    for rank, outcome in enumerate(ranks):
        kind = "OSError" if rank == 1 else f"{PlannerFailedError.__name__}: rank 1: OSError"
        assert outcome == {
            "texts": ["", "2 ü2 ü"],
            "no failure": f"value {rank}",
            "two fail": f"InfeasibleError: {'' if rank == 1 else 'rank 1: '}too large\nhint: less",
            "other kind": f"{kind}: disk of 1",
            "plans": ["agreed", said],
        }


DIFFERENCES = [
    # what rank 0 and rank 1 hold, and what is found
    (({"a": "1", "b": "ü"}, {"a": "1", "b": "ü"}), "None"),
    (({"a": "1", "b": "2"}, {"a": "1", "b": "3"}), "b is 2 on rank 0 and 3 on rank 1"),
    (({"b": "2", "a": "1"}, {"a": "9", "b": "3"}), "a is 1 on rank 0 and 9 on rank 1"),
    (({}, {"a": "1"}), "None"),
    (({}, {}), "None"),
]
SAME, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def _differences(*, rank: int, world_size: int) -> list[str]:
    return _control(lambda control: [str(control.find_difference(fields[rank])) for fields, _ in DIFFERENCES])


def test_the_first_field_in_which_ranks_differ_is_the_same_on_all():
    assert run_ranks(_differences, 2) == [[difference for _, difference in DIFFERENCES]] * 2


def _agree(control, plan: str) -> str:
    try:
        control.start_agreement(None, plan=plan, what="iteration 4").settle()
    except PlanError as error:
        return error.message
    return "agreed"


def _same_runs(*, rank: int, world_size: int, cases: list[tuple[list[str], list[int]]]) -> list[str]:
    import argparse

    from megatron_dynapipe.integration.supply.agreement import check_same_run

    os.environ["LOCAL_RANK"] = "0"  # each is a node of its own

    def check(control, folder: str, seed: int) -> str:
        sampler = SamplerSettings(family=ModelFamily.GPT, seed=seed, samples_per_iteration=4, max_input_length=80)
        shape = ModelShape(family=ModelFamily.GPT, hidden=32, heads=2, kv_channels=16, ffn=64, vocabulary=512)
        inputs = PlanInputs(
            data_folder=folder,
            splits=(SplitSettings(name="train", sampler=sampler),),
            planner=PlannerSettings(family=ModelFamily.GPT, encoder_layers=2, hidden_size=32, memory_limit_bytes=10**9),
            costs=AnalyticCosts(shape=shape, rates=CPU_RATES, max_size=4, max_length=128),
        )
        try:
            check_same_run(control, argparse.Namespace(data=Path(folder)), inputs)
        except DynaPipeError as error:
            return f"{type(error).__name__}: {error.message}"
        return "same"

    return _control(lambda control: [check(control, folders[rank], seeds[rank]) for folders, seeds in cases])


def test_nodes_with_other_data_of_equal_lengths_or_other_settings_do_not_train(tmp_path):
    """The lengths are the same, so that the plans of other data are."""
    first = make_dataset(tmp_path / "first")
    copied, changed = (str(shutil.copytree(first, tmp_path / name)) for name in ("copied", "changed"))
    content = Path(changed, "train.bin").read_bytes()
    Path(changed, "train.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    cases = [([str(first), other], seeds) for other, seeds in ((copied, [1, 1]), (changed, [1, 1]), (copied, [1, 2]))]
    one, other = run_ranks(_same_runs, 2, {"cases": cases})
    assert one == other and one[0] == "same"
    assert one[1].startswith("DataError: expected the same dataset on all nodes: the digest of train.bin is ")
    settings = "ConfigError: expected the same settings on all ranks: splits.train.sampler.seed is 1 on rank 0 and 2 on"
    assert one[2] == f"{settings} rank 1"
