"""How much of a dataset's batches would be padding, by the method that makes micro-batches of them.

Plans are made with computed costs of a model of 1024 hidden units on one device: what is padding depends on lengths,
hardly on the model.
"""

from collections.abc import Mapping, Sequence

from megatron_dynapipe.cost import A100_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout, ModelFamily, round_up

_HIDDEN, _HEADS, _LAYERS, _VOCABULARY = 1024, 16, 4, 32_000
_MEMORY_BYTES = 80_000_000_000

METHODS: Mapping[str, tuple[PartitionAlgorithm, tuple[BatchLayout, ...]]] = {
    "dynapipe": (PartitionAlgorithm.DP, tuple(BatchLayout)),
    "dynapipe, padded": (PartitionAlgorithm.DP, (BatchLayout.PADDED,)),
    "packed rows": (PartitionAlgorithm.PACKED_ROWS, (BatchLayout.PACKED,)),
    "token based": (PartitionAlgorithm.TOKEN_BASED, (BatchLayout.PADDED,)),
    "uniform": (PartitionAlgorithm.UNIFORM, (BatchLayout.PADDED,)),
    "padding": (PartitionAlgorithm.PADDING, (BatchLayout.PADDED,)),
}
"""By their names in a table."""


def padding_waste(batches: Sequence[GlobalBatch], family: ModelFamily) -> dict[str, float | None]:
    """The share of padding among all positions of some batches, by method; None where a method has no plan.

    Args:
        batches: at least one.
        family: kind of model.
    """
    longest_input = round_up(max(int(batch.input_lengths.max()) for batch in batches))
    longest_target = round_up(max(int(batch.target_lengths.max()) for batch in batches) + 2)
    costs = AnalyticCostModel(
        ModelShape(
            family=family,
            hidden=_HIDDEN,
            heads=_HEADS,
            kv_channels=_HIDDEN // _HEADS,
            ffn=4 * _HIDDEN,
            vocabulary=_VOCABULARY,
        ),
        A100_RATES,
        max_size=max(len(batch) for batch in batches),
        max_length=max(longest_input, longest_target, 8),
    )
    return {name: _waste(batches, family, costs, *method) for name, method in METHODS.items()}


def _waste(
    batches: Sequence[GlobalBatch],
    family: ModelFamily,
    costs: AnalyticCostModel,
    algorithm: PartitionAlgorithm,
    layouts: tuple[BatchLayout, ...],
) -> float | None:
    settings = PlannerSettings(
        family=family,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS if family is ModelFamily.T5 else 0,
        hidden_size=_HIDDEN,
        memory_limit_bytes=_MEMORY_BYTES,
        micro_batch_layouts=layouts,
        partition=PartitionSettings(algorithm=algorithm),
        schedule=ScheduleSettings(search_evaluations=0),
    )
    planner = Planner(settings, costs)
    real = positions = 0
    for batch in batches:
        try:
            totals = planner.plan(batch, 0).totals
        except PlanningError:
            return None
        real += totals.real_tokens
        positions += totals.padded_positions
    return round(max(0.0, 1 - real / positions), 4)
