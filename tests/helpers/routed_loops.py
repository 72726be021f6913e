"""A loop whose experts are shared by two replicas, and whose routers replay routes, as verl's and slime's do.

Routes are taken by their places in a list: in the backward pass, which computes layers again, first in, first out.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import unwrap_model

from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.tools.loop import planned
from megatron_dynapipe.tools.loop_settings import state_of
from tests.helpers.layouts.layout import MAX_LENGTH, VOCABULARY, Layout
from tests.helpers.layouts.model import config
from tests.helpers.loops import Loop, by_megatron, by_plans, costs, wire_rows

EXPERTS, CHOSEN = 4, 2
ACTIVATIONS_BYTES = 400_000
"""So few that the samples are several micro-batches, although layers are computed again."""


class RoutedLoop(Loop):
    """One rank; every layer has experts, and each sample routes of its own in every layer."""

    def start(self) -> None:
        dist.init_process_group("gloo", init_method="env://")
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=self.layout.stages, expert_model_parallel_size=self.layout.replicas
        )
        model_parallel_cuda_manual_seed(1)

    def build(self) -> list[torch.nn.Module]:
        RouterReplay.clear_global_router_replay_instances()  # the policy is built last
        sizes = replace(
            config(self.layout),
            num_moe_experts=EXPERTS,
            expert_model_parallel_size=self.layout.replicas,
            moe_router_topk=CHOSEN,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_enable_routing_replay=True,
            add_bias_linear=False,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = GPTModel(
            config=sizes,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=EXPERTS),
            vocab_size=VOCABULARY,
            max_sequence_length=MAX_LENGTH,
            pre_process=stage == 0,
            post_process=stage == self.layout.stages - 1,
        )
        return [model]

    def routes(self, sample: int, layer: int, positions: int) -> torch.Tensor:
        """[positions, chosen], experts of each."""
        generator = torch.Generator().manual_seed(1000 * self.replica + 10 * sample + layer)
        return torch.rand(positions, EXPERTS, generator=generator).argsort(-1)[:, :CHOSEN]

    def step(self, rows: Iterator[Any], model: torch.nn.Module, *, update: bool) -> tuple[Any, Callable[..., Any]]:
        row = next(rows)
        ends = [*(part.start for part in row["parts"][1:]), row["tokens"].size(1)]
        lengths = [end - part.start for part, end in zip(row["parts"], ends, strict=True)]
        first = parallel_state.get_pipeline_model_parallel_rank() * len(RouterReplay.global_router_replay_instances)
        for layer, router in enumerate(RouterReplay.global_router_replay_instances, first):
            each = zip(row["indices"], lengths, strict=True)
            router.set_target_indices(torch.cat([self.routes(sample, layer, length) for sample, length in each]))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        found = super().step(iter([row]), model, update=update)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return found

    def updated(self, run: Callable[..., dict[str, Any]]) -> list[torch.Tensor]:
        """Gradients of one update; log-probabilities of before are none in particular."""
        RouterReplay.clear_global_indices()
        before = [torch.full((length,), -6.0) for length in self.lengths]
        for chunk in self.policy:
            chunk.zero_grad_buffer()
        run(self.policy, update=True, old=before, reference=before)
        return [parameter.main_grad.clone() for chunk in self.policy for parameter in chunk.parameters()]

    def gradients(self) -> list[Any]:
        """Experts have the names of each rank's own: gradients are compared rank by rank."""
        return []


def replayed(*, rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    """Gradients by Megatron's schedule, by plans, and by plans with other routes in backward passes."""
    loop = RoutedLoop(layout)
    found = {"megatron": loop.updated(by_megatron(loop))}
    seen: list[Any] = []
    memory_mb = (max(state_of(loop.policy, ControlGroup(timeout_s=60))) + ACTIVATIONS_BYTES) / 1e6
    with planned(loop.policy, costs(), memory_mb=memory_mb, wire_rows=wire_rows) as plans:
        passes = by_plans(loop, plans, seen)
        found["planned"] = loop.updated(passes)
        with mock.patch.object(RouterReplay, "get_replay_topk", others_in_backward(RouterReplay.get_replay_topk)):
            found["other routes"] = loop.updated(passes)
    names = [name for chunk in unwrap_model(loop.policy) for name, _ in chunk.named_parameters()]
    return {"found": found, "names": names, "counts": [len(each) for each in seen]}


def others_in_backward(of_megatron: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's replay, which takes other routes in backward passes."""

    def replay(router: RouterReplay, *arguments: Any, **keywords: Any) -> Any:
        if router.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            router.replay_backward_list[0] = (router.replay_backward_list[0] + 1) % EXPERTS
        return of_megatron(router, *arguments, **keywords)

    return replay
