"""What plans of some ways have to hold, in addition to what every plan has to: for pieces, replicas in step, teams."""

from collections.abc import Collection, Sequence

from megatron_dynapipe.core.instructions import Instruction
from megatron_dynapipe.core.memory import ELEMENT_BYTES
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch
from megatron_dynapipe.core.verify import FastVerify
from megatron_dynapipe.core.verify import verify as verify_by
from megatron_dynapipe.ways.chains import check_chain_order, check_pieces
from megatron_dynapipe.ways.step_rule import check_in_step
from megatron_dynapipe.ways.teams_rule import check_teams


class RulesOfWays:
    """The rules of pieces, of replicas in step and of teams; see `core.verify.PlanRules`."""

    def check(self, plan: IterationPlan) -> None:
        """Raise a PlanError where replicas leave their step or their team, or pieces do not tile their sample."""
        check_in_step(plan)
        check_teams(plan)
        for index, replica in enumerate(plan.replicas):
            check_pieces(plan.family, index, replica.micro_batches)

    def check_passes(self, stage: int, micro_batches: Sequence[MicroBatch], passes: Sequence[Instruction]) -> None:
        """Raise a PlanError where pieces of a sample run out of their order."""
        check_chain_order(stage, micro_batches, passes)


RULES = RulesOfWays()


def verify(
    plan: IterationPlan,
    *,
    expected_samples: Collection[int] | None = None,
    fast_verify: FastVerify | None = None,
    ordered_starts: bool = False,
    element_bytes: int = ELEMENT_BYTES,
) -> None:
    """Verify a plan by the rules of all ways; with the arguments and errors of `core.verify.verify`."""
    verify_by(
        plan,
        rules=RULES,
        expected_samples=expected_samples,
        fast_verify=fast_verify,
        ordered_starts=ordered_starts,
        element_bytes=element_bytes,
    )
