"""All of Megatron's arguments, of every supported version, with what a planned run does with each.

Whatever the table does not name is an argument that nobody has decided on: a test holds it against the installed
Megatron, so that a new flag is noticed before a user gives it.
"""

from megatron_dynapipe.integration.flags.megatron import elsewhere, files, model, training
from megatron_dynapipe.integration.flags.megatron.decisions import Group, Refusal

TABLE: tuple[Group, ...] = (*model.GROUPS, *training.GROUPS, *files.GROUPS, *elsewhere.GROUPS)
"""The decisions, in Megatron's groups."""

REFUSED: dict[str, Refusal] = {flag: refusal for group in TABLE for flag, refusal in group.refusals()}
"""The flags that are refused."""

IGNORED: dict[str, str] = {
    flag: reason for group in TABLE for reason, flags in group.ignored.items() for flag in flags.split()
}
"""The flags without effect, and why they have none."""

__all__ = ["IGNORED", "REFUSED", "TABLE", "Group", "Refusal"]
