"""Patching an existing Megatron-LM checkout: what its files are, by content; all or nothing; merging on request."""

from megatron_dynapipe.patching.checkout import Checkout, examine, refusal
from megatron_dynapipe.patching.merging import merge, merged
from megatron_dynapipe.patching.series import Patch, Series, load_all
from megatron_dynapipe.patching.survey import FileReport, State, Survey, survey

__all__ = [
    "Checkout",
    "FileReport",
    "Patch",
    "Series",
    "State",
    "Survey",
    "examine",
    "load_all",
    "merge",
    "merged",
    "refusal",
    "survey",
]
