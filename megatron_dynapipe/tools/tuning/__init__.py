"""Which parallel layout trains a mixture fastest: the space of layouts, bounds that prune it, a best-first search; and
for a layer profile, stages with different numbers of replicas."""

from megatron_dynapipe.tools.tuning.layer_profile import Layer, LayerProfile
from megatron_dynapipe.tools.tuning.orchestrate import Orchestration, orchestrate
from megatron_dynapipe.tools.tuning.own_model import tune_segments
from megatron_dynapipe.tools.tuning.search import tune
from megatron_dynapipe.tools.tuning.space import Space, TunedLayout, Tuning, fastest_of
from megatron_dynapipe.tools.tuning.topology import Topology
