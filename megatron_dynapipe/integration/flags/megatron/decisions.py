"""What a planned run does with each of Megatron's arguments: the form in which the decisions are written down."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Reasons = Mapping[str, str]
"""From a reason to the flags that it holds for, separated by white space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a flag is refused, and where.

    Attributes:
        reason: completes "--flag cannot be used with DynaPipe: …".
        only: "entry script", "local layers" or "T5" if it is refused there alone; empty if everywhere.
    """

    reason: str
    only: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The decisions on one group of Megatron's arguments. A flag stands once, under the first of its names.

    Attributes:
        title: of the group in Megatron's --help.
        supported: does what Megatron says it does, which may be to refuse it.
        refused: would not do so; giving another value than the default is an error.
        refused_in_entry_scripts: likewise, but a patched checkout, which builds its own model, takes it.
        refused_with_local_layers: likewise, with --transformer-impl local.
        refused_for_t5: likewise, for a T5.
        ignored: has no effect on a planned run; giving it is said in one line.
    """

    title: str
    supported: str = ""
    refused: Reasons = field(default_factory=dict)
    refused_in_entry_scripts: Reasons = field(default_factory=dict)
    refused_with_local_layers: Reasons = field(default_factory=dict)
    refused_for_t5: Reasons = field(default_factory=dict)
    ignored: Reasons = field(default_factory=dict)

    def refusals(self) -> Iterator[tuple[str, Refusal]]:
        """Every refused flag."""
        for only, reasons in (
            ("", self.refused),
            ("entry script", self.refused_in_entry_scripts),
            ("local layers", self.refused_with_local_layers),
            ("T5", self.refused_for_t5),
        ):
            for reason, flags in reasons.items():
                yield from ((flag, Refusal(reason=reason, only=only)) for flag in flags.split())

    def flags(self) -> list[str]:
        """Every flag, as often as it is written down."""
        ignored = [flag for flags in self.ignored.values() for flag in flags.split()]
        return [*self.supported.split(), *(flag for flag, _ in self.refusals()), *ignored]
