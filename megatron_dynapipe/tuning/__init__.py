"""Which parallel layout trains a mixture fastest: the space of layouts, bounds that prune it, a best-first search."""

from megatron_dynapipe.tuning.search import Progress, Status, TunedLayout, Tuning, tune
from megatron_dynapipe.tuning.space import Candidate, Space, Split, candidates
from megatron_dynapipe.tuning.step_costs import StepRates

__all__ = [
    "Candidate",
    "Progress",
    "Space",
    "Split",
    "Status",
    "StepRates",
    "TunedLayout",
    "Tuning",
    "candidates",
    "tune",
]
