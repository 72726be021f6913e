"""Layers of experts of built models, with terms that do not depend on how samples are put into micro-batches.

What Megatron takes as means over a micro-batch are sums over positions x of samples here, without padding, divided like
the loss by the iteration's target tokens. p_x are the router's scores; there are E experts, and a position has k:

    z-loss        c · Σ_x logsumexp(logits_x)²
    seq_aux_loss  c · E/k · Σ_samples s Σ_i n_si/n_s · Σ_{x in s} p_xi     n_si positions of s have expert i
    aux_loss      c · E · Σ_i f_i · Σ_x p_xi                 f_i: share of expert i in the iteration before
    expert bias   positions of every expert, over the iteration

The mask of positions that count comes in at `routing`: adapters of a router call that, and not its forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_dynapipe.megatron.equip.subclass import become
from megatron_dynapipe.megatron.models.grouped_experts import GroupedExperts

_LOGGED = {"z_loss": "z_loss", "aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""The terms, and Megatron's names of them in its log."""


class RouterTerms(TopKRouter):
    """Megatron's router (`become`); `begin` says to which sample each position of a micro-batch belongs.

    Attributes:
        expert_shares: with `aux_loss`, float32[experts]: f_i.
    """

    _samples: Tensor | None = None
    _number: int = 0
    _sums: Tensor | None = None

    def share_evenly(self, *, saved: bool) -> None:
        """Begin with even shares if a term asks for the previous iteration's; `saved`: in checkpoints."""
        if self._has("aux_loss") and not hasattr(self, "expert_shares"):
            experts = self.config.num_moe_experts
            shares = torch.full((experts,), 1 / experts, device=self.weight.device)
            self.register_buffer("expert_shares", shares, persistent=saved)

    @property
    def adds_terms(self) -> bool:
        """Whether it does anything that asks for positions without padding."""
        config = self.config
        return bool(config.moe_z_loss_coeff or config.moe_router_enable_expert_bias or self.is_aux_loss_enabled())

    def begin(self, samples: Tensor | None, number: int) -> None:
        """The passes that follow are of a micro-batch.

        Args:
            samples: int64[s, b] on the device, the number of each position's sample, `number` for padding; None adds no
                terms.
            number: the number of samples.
        """
        if samples is not None and self.config.sequence_parallel:
            samples = samples.chunk(self.tp_group.size())[self.tp_group.rank()]
        self._samples = None if samples is None else samples.flatten()
        self._number = number

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Do what Megatron's does, with the positions that count, whatever it is given."""
        padding_mask = None if self._samples is None else self._samples == self._number
        routed: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        return routed

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach it to the logits."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or padding_mask is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square() * ~padding_mask
        return self._attach(logits, "z_loss", squares.sum(), coefficient)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient or not with_padding_mask:
            return probs
        self._add(slice(len(_LOGGED) + 1, None), routing_map.sum(dim=0))
        loss = self.config.num_moe_experts * (self.expert_shares * scores_for_aux_loss.sum(dim=0)).sum()
        return self._attach(probs, "aux_loss", loss, coefficient)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if not coefficient or not with_padding_mask:
            return probs
        assert self._samples is not None
        empty = scores_for_aux_loss.new_zeros(self._number + 1, self.config.num_moe_experts)
        scores = empty.index_add(0, self._samples, scores_for_aux_loss)
        chosen = empty.index_add(0, self._samples, routing_map.to(empty.dtype))
        chosen = reduce_from_tensor_model_parallel_region(chosen, self.tp_cp_group)
        shares = chosen / chosen.sum(dim=1, keepdim=True).clamp(min=1)
        return self._attach(probs, "seq_aux_loss", self.config.num_moe_experts * (shares * scores).sum(), coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron's takes the mask for one of experts."""
        if padding_mask is None or not torch.is_grad_enabled():
            return
        self._add(slice(len(_LOGGED), len(_LOGGED) + 1), (~padding_mask).sum())
        if self.enable_expert_bias:
            self.local_tokens_per_expert += (routing_map & ~padding_mask.unsqueeze(-1)).sum(dim=0)

    def _maintain_float32_expert_bias(self) -> None:
        """In half precision sums stop growing."""
        super()._maintain_float32_expert_bias()
        for name in ("local_tokens_per_expert", "expert_shares"):
            buffer = getattr(self, name, None)
            if buffer is not None and buffer.dtype != torch.float32:
                buffer.data = buffer.data.to(torch.float32)

    def _attach(self, activation: Tensor, name: str, loss: Tensor, coefficient: float) -> Tensor:
        place = list(_LOGGED).index(name)
        self._add(slice(place, place + 1), loss.detach())
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, coefficient * loss)
        return attached

    def _add(self, where: slice, value: Tensor) -> None:
        self.sums[where] += value

    @property
    def sums(self) -> Tensor:
        """Sums of the iteration, float32: the terms, the positions, and positions of every expert."""
        if self._sums is None:
            length = len(_LOGGED) + 1 + self.config.num_moe_experts
            self._sums = torch.zeros(length, device=self.weight.device)
        return self._sums

    def finish(self, sums: Tensor) -> None:
        """End an iteration; these are its sums over all ranks."""
        means = sums[: len(_LOGGED)] / sums[len(_LOGGED)].clamp(min=1)
        for mean, (name, logged) in zip(means, _LOGGED.items(), strict=True):
            if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None and self._has(name):
                mean = mean * calculator.get_num_microbatches()  # by which Megatron's log divides
                get_moe_metrics_tracker().record(logged, mean, self.layer_number, self.config.num_layers)
        if self._has("aux_loss"):
            of_experts = sums[len(_LOGGED) + 1 :]
            self.expert_shares.copy_(of_experts / of_experts.sum())
        self.sums.zero_()

    def _has(self, name: str) -> bool:
        return bool(self.config.moe_z_loss_coeff if name == "z_loss" else self.get_aux_loss_coeff(name))


def equip_experts(chunks: Sequence[nn.Module], *, saved: bool = False) -> None:
    """Have routers add these terms, ranks exchange uneven numbers of positions, and local experts run in groups.

    Args:
        chunks: a rank's; those that are equipped already stay as they are.
        saved: whether routers' shares are a part of checkpoints. Then one that is loaded later has to have them, which
            one that was converted from elsewhere has not; else a run that goes on begins with even shares.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TopKRouter):
            become(module, RouterTerms)
            module.share_evenly(saved=saved)
        elif type(module) is SequentialMLP:
            become(module, GroupedExperts)
        dispatcher = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAllGatherTokenDispatcher) and dispatcher.tp_size * dispatcher.ep_size > 1:
            become(dispatcher, UnevenAllGather)


def uncut_because(chunks: Sequence[nn.Module]) -> str:
    """Why experts take no pieces of samples; empty where they do."""
    counts = any(router.get_aux_loss_coeff("seq_aux_loss") for router in routers_of(chunks))
    return "seq_aux_loss counts whole samples" if counts else ""


def routers_of(models: Sequence[nn.Module]) -> list[RouterTerms]:
    """The routers of model chunks that add terms."""
    routers = [module for model in models for module in model.modules() if isinstance(module, RouterTerms)]
    return [router for router in routers if router.adds_terms]


def forget_iteration(models: Sequence[nn.Module]) -> None:
    """Drop what the routers have counted since the last iteration."""
    for router in routers_of(models):
        router.sums.zero_()
        if router.enable_expert_bias:
            router.local_tokens_per_expert.zero_()


def finish_iteration(models: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Add up what the routers of all replicas have counted."""
    config = get_model_config(models[0])
    if config.num_moe_experts is None:
        return
    for logged in _LOGGED.values():
        # Megatron 0.19 makes them too short to be reduced over stages if a HybridModel's stage has no experts.
        get_moe_metrics_tracker().ensure_initialized(logged, config.num_layers)
    routers = routers_of(models)
    if not routers:
        return
    sums = torch.stack([router.sums for router in routers])
    torch.distributed.all_reduce(sums, group=groups.tp_dp_cp)
    for router, router_sums in zip(routers, sums, strict=True):
        router.finish(router_sums)


class UnevenAllGather(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher of all positions to all ranks, where ranks have different numbers of them.

    All pad theirs to the most of any rank, with positions that no expert gets. Ranks ask each other, for which the host
    waits for the device: a plan's entries hold one replica's shapes.

    Attributes:
        asked: the most positions of layers that run all of them (False) and of one that runs rows with labels (True),
            as the first such layer of the pass that runs was told, which the others share; None lets each ask.
        gather: takes the rows before the last layer's MLP (`labelled_rows.RowGather`); None where nothing does.
    """

    asked: dict[bool, int] | None = None
    gather: Any = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Do what Megatron's does, and pad."""
        hidden_states, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        asked: dict[bool, int] = {} if self.asked is None else self.asked
        labelled = self.gather is not None and self.gather.rows is not None
        if labelled not in asked:
            most = torch.tensor(len(hidden_states), device=hidden_states.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self.tp_ep_group)
            asked[labelled] = int(most)
        self._own = len(hidden_states)
        missing = asked[labelled] - len(hidden_states)
        self.routing_map: Tensor = nn.functional.pad(routing_map, (0, 0, 0, missing))
        return nn.functional.pad(hidden_states, (0, 0, 0, missing)), nn.functional.pad(probs, (0, 0, 0, missing))

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Do what Megatron's does, without what was padded."""
        combined: Tensor = super().combine_postprocess(hidden_states[: self._own])
        return combined


def gatherers_of(models: Sequence[nn.Module]) -> list[UnevenAllGather]:
    """The dispatchers of model chunks whose ranks ask for the most positions."""
    dispatchers = (getattr(module, "token_dispatcher", None) for model in models for module in model.modules())
    return [dispatcher for dispatcher in dispatchers if isinstance(dispatcher, UnevenAllGather)]


def begin_pass(gatherers: Sequence[UnevenAllGather]) -> None:
    """Let the first layer of the pass that runs next ask for all that run as many positions."""
    asked: dict[bool, int] = {}
    for gatherer in gatherers:
        gatherer.asked = asked
