"""NaN and Inf are looked for once per iteration: each look waits for the device."""

from tests.helpers.entry_scripts import train
from tests.helpers.processes import in_ranks
from tests.helpers.random_dataset import make_dataset


@in_ranks(1)
def test_one_look_per_iteration():
    import torch

    from megatron_dynapipe.integration.execution import step_functions

    asked: list[str] = []

    class Machine:
        def validate_result(self, *, result, rejection_func, message, tolerance, fatal):
            asked.append("rejected" if rejection_func(result) else "accepted")
            assert fatal and tolerance == 0.0 and "NaN or Inf" in message

    step_functions.get_rerun_state_machine = Machine
    for losses, said in (
        ([], []),
        ([1.0, 2.0, 3.0], ["accepted"]),
        ([1.0, float("nan")], ["rejected"]),
        ([float("inf"), 1.0], ["rejected"]),
    ):
        step_functions.check_losses([{"lm loss": torch.tensor([loss, 3.0])} for loss in losses])
        assert asked == said
        asked.clear()


def test_a_batch_without_labels_has_the_loss_0_and_says_so(tmp_path):
    """All samples lose their targets; Megatron would divide 0 by 0."""
    data = make_dataset(tmp_path / "data", lengths=(50, 60))
    flags = "--train-iters 2 --seq-length 16 --dynapipe-long-samples truncate --dynapipe-loss targets"
    _, last = train("gpt", data, flags, ranks=2, report=tmp_path / "report")
    assert last["losses"] == {"1": 0.0, "2": 0.0}
    lines = [line for line in last["stdout"].splitlines() if " iteration " in line and " lm loss: " in line]
    assert len(lines) == 2
    for line in lines:
        assert " lm loss: 0.000000E+00 |" in line and " no token of this batch counts |" in line
