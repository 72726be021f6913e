"""The ways to make micro-batches that a run's settings allow.

whole      samples as they are, padded or packed        pieces     long samples cut along their sequence
in_step    replicas that run the same passes            theirs     as another trainer makes them
teams      long samples on several replicas at once
"""

from collections.abc import Sequence

from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.ways import Way
from megatron_dynapipe.ways.in_step import InStep
from megatron_dynapipe.ways.pieces import CutSamples
from megatron_dynapipe.ways.teams import Teams
from megatron_dynapipe.ways.theirs import Theirs
from megatron_dynapipe.ways.whole import WholeSamples


def ways_of(settings: PlannerSettings) -> Sequence[Sequence[Way]]:
    """Ways that are tried together, and those to try where nothing is found of the ones before."""
    tried = _of_one_replica(settings)
    if settings.context_teams > 1:
        return [[Teams(settings, ways)] for ways in tried]
    if settings.replicas_in_step == 1:
        return tried
    return [[InStep(settings, ways)] for ways in tried]


def _of_one_replica(settings: PlannerSettings) -> Sequence[Sequence[Way]]:
    if settings.partition is not None:
        return [[Theirs(settings.partition, settings.hidden_size)]]
    if not settings.may_cut:
        return [[WholeSamples()]]
    if settings.slices == "auto":
        return [[WholeSamples(), CutSamples(settings)], [CutSamples(settings, is_needed=True)]]
    return [[CutSamples(settings)], [WholeSamples()]]
