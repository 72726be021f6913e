"""What all ranks agree on: one text, one failure."""

from megatron_dynapipe.errors import InfeasibleError, PlannerFailedError
from tests.helpers.processes import run_ranks


def _control(function):
    import torch.distributed as dist

    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo")
    return function(ControlGroup(timeout_s=20))


def _texts(*, rank: int, world_size: int) -> list[str]:
    return _control(lambda control: [control.broadcast_text(f"{rank} ü" * rank, source=source) for source in (0, 2)])


def test_a_text_reaches_every_rank():
    assert run_ranks(_texts, 3) == [["", "2 ü2 ü"]] * 3


def _fail_on(*, rank: int, world_size: int, ranks: list[int], kind: str) -> str:
    def run(control) -> str:
        def work() -> int:
            if rank in ranks:
                error = InfeasibleError("too large", hint="less") if kind == "ours" else OSError(f"disk of {rank}")
                raise error
            return rank

        try:
            value = control.run_on_all(work)
        except Exception as error:  # noqa: BLE001  (the outcome under test)
            return f"{type(error).__name__}: {error}"
        return f"value {value}"

    return _control(run)


def test_without_a_failure_every_rank_has_its_own_value():
    assert run_ranks(_fail_on, 3, {"ranks": [], "kind": "ours"}) == ["value 0", "value 1", "value 2"]


def test_the_lowest_failing_ranks_error_is_raised_on_all():
    outcomes = run_ranks(_fail_on, 3, {"ranks": [1, 2], "kind": "ours"})
    assert outcomes[1] == "InfeasibleError: too large\nhint: less"
    for rank in (0, 2):
        assert outcomes[rank] == "InfeasibleError: rank 1: too large\nhint: less"


def test_an_error_of_another_kind_keeps_its_name_in_the_message():
    outcomes = run_ranks(_fail_on, 2, {"ranks": [1], "kind": "other"})
    assert outcomes == [f"{PlannerFailedError.__name__}: rank 1: OSError: disk of 1", "OSError: disk of 1"]
