"""NaN and Inf are looked for once per iteration: each look waits for the device."""

from tests.helpers.processes import in_ranks


@in_ranks(1)
def test_one_look_per_iteration():
    import torch

    from megatron_dynapipe.megatron.execution import step_functions

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
