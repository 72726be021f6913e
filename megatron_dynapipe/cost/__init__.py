"""The costs of a micro-batch in time and memory: measured tables, an analytic model, layouts, links. No torch."""

from megatron_dynapipe.cost.analytic import A100_RATES, CPU_RATES, AnalyticCostModel, DeviceRates
from megatron_dynapipe.cost.file import TableCostModel
from megatron_dynapipe.cost.layout import PipelineLayout, Split, in_modules
from megatron_dynapipe.cost.links import Links
from megatron_dynapipe.cost.model import CostModel
from megatron_dynapipe.cost.network import Network, ScatterGather
from megatron_dynapipe.cost.shape import Experts, ModelShape
from megatron_dynapipe.cost.splits import even_split, of_modules, parse_split
from megatron_dynapipe.cost.stage_modules import StageModules, stage_modules
from megatron_dynapipe.cost.state import ModelState
from megatron_dynapipe.cost.tables import ABSENT, LARGEST_COST, CostTables, Kind, PackedTables, Quantity
