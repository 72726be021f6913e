"""The costs of a micro-batch in time and memory: measured tables, an analytic model, layouts, links. No torch."""

from megatron_dynapipe.core.costs import ABSENT, LARGEST_COST, CostTables, Kind, ModelState, PackedTables, Quantity
from megatron_dynapipe.core.model import LayerSplit, Model, PipelineLayout
from megatron_dynapipe.core.network import Links, Network, ScatterGather
from megatron_dynapipe.costing.analytic import A100_RATES, CPU_RATES, AnalyticCostModel, DeviceRates
from megatron_dynapipe.costing.file import TableCostModel
from megatron_dynapipe.costing.layers import family_of_flags, model_of_layers
from megatron_dynapipe.costing.model import CostModel
from megatron_dynapipe.costing.shape import Experts, ModelShape
from megatron_dynapipe.costing.splits import even_layer_split, parse_layer_split
from megatron_dynapipe.costing.stage_modules import StageModules, stage_modules
