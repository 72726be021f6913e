"""From a run's configuration to the planner's inputs: model, layout, memory, splits, costs."""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe.cost import A100_RATES, CPU_RATES, DeviceRates, ModelShape, Split, even_split
from megatron_dynapipe.cost.analytic import rates_of
from megatron_dynapipe.cost.file import check_measured_model
from megatron_dynapipe.cost.format import read_file
from megatron_dynapipe.integration.flags import machine
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.models.config import ModelConfig
from megatron_dynapipe.integration.models.positions import LEARNED, RELATIVE, ROTARY
from megatron_dynapipe.integration.models.specs import CoreAttention
from megatron_dynapipe.plan.transfer_rules import GLOO_RULES, cuda_rules
from megatron_dynapipe.planning.layer_split import BATCHES, choose_layer_split
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.service.loop import split_sampler
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts, PlanInputs, SplitSettings

_MOST_BY_TOKENS = 4096
"""Samples of a micro-batch at most, where an iteration holds any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Megatron's counters as training begins, which a checkpoint sets."""

    iteration: int = 0
    valid_samples: int = 0


START = Progress()
"""Of a run that resumes nothing."""


def plan_inputs(run: RunConfig, progress: Progress = START) -> PlanInputs:
    """Everything plans are made from, the same on every rank."""
    return PlanInputs(
        data_folder=str(run.data),
        splits=_splits(run, progress),
        planner=_planner(run, run.parallel.layers_per_stage),
        costs=_costs(run),
    )


def _splits(run: RunConfig, progress: Progress) -> tuple[SplitSettings, ...]:
    """Train, and with evaluation valid and test; a resumed run continues from Megatron's counters."""
    training = run.training
    train = SplitSettings(
        name="train",
        sampler=training.sampler,
        first_iteration=progress.iteration,
        iterations=max(training.iterations - progress.iteration, 0),
    )
    if not training.evaluation_iterations:
        return (train,)
    valid = SplitSettings(
        name="valid",
        sampler=training.evaluation,
        first_iteration=progress.valid_samples // training.evaluation.samples_per_iteration,
        forward_only=True,
    )
    test = SplitSettings(
        name="test", sampler=training.evaluation, iterations=training.evaluation_iterations, forward_only=True
    )
    return train, valid, test


def _planner(run: RunConfig, layers_per_stage: Split | None) -> PlannerSettings:
    model, parallel = run.model, run.parallel
    return PlannerSettings(
        family=model.family,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        hidden_size=model.hidden,
        data_parallel=parallel.data,
        tensor_parallel=parallel.tensor,
        pipeline_parallel=parallel.pipeline,
        chunks=parallel.chunks,
        layers_per_stage=layers_per_stage,
        memory_limit_bytes=run.memory_limit_bytes or machine.device_memory_bytes(run.cluster, on_cpu=run.on_cpu),
        distributed_optimizer=parallel.distributed_optimizer,
        recompute=run.recompute,
        network=machine.network(run.cost_model, run.cluster),
        scatter_gather=run.scatter_gather,
        micro_batch_layouts=run.layouts.allowed,
        slices=run.slices,
        expert_layers=model.experts.layers if model.experts else (),
        expert_parallel=parallel.in_step,
        expert_imbalance=run.expert_imbalance,
        lockstep=parallel.in_step > 1 and parallel.in_step,
        split_backward=run.split_backward,
        element_bytes=model.state_dtype.itemsize,
        transfers=GLOO_RULES if run.on_cpu else cuda_rules(os.environ),
        sequence_parallel=model.sequence_parallel,
    )


def chosen_layer_split(run: RunConfig, *, halves: bool = True) -> Split:
    """The layers per stage under which the run's first iterations are predicted to be fastest, the same on every rank.

    Every sample of the data that fits under the even split fits under the chosen one. Without `halves` layers stay
    whole.

    Raises:
        ConfigError: more stages than layers.
        PlanningError: none of the iterations can be planned.
    """
    settings = run.training.sampler
    sampler = split_sampler(run.data, SplitSettings(name="train", sampler=settings))
    count = sampler.batches.count
    batches = [sampler.batch(iteration) for iteration in range(BATCHES if count is None else min(BATCHES, count))]
    whole = msgspec.structs.replace(run.training.evaluation, samples_per_iteration=sampler.samples_per_epoch)
    epoch = split_sampler(run.data, SplitSettings(name="train", sampler=whole)).batch(0)
    even = even_split(run.model.encoder_layers + run.model.decoder_layers, run.parallel.stages, halves=halves)
    return choose_layer_split(_planner(run, even), _costs(run).load(), batches, to_fit=[epoch], halves=halves)


def _costs(run: RunConfig) -> MeasuredCosts | AnalyticCosts:
    shape, training = model_shape(run.model, on_cpu=run.on_cpu), run.training
    if run.cost_model is not None:
        measured = msgspec.structs.asdict(shape)
        check_measured_model(read_file(run.cost_model)[0], measured, tensor_parallel=run.parallel.tensor)
        return MeasuredCosts(path=str(Path(run.cost_model).absolute()))
    by_tokens = training.sampler.tokens_per_iteration is not None
    return AnalyticCosts(
        shape=shape,
        rates=_rates(run),
        max_size=max(training.most_samples, _MOST_BY_TOKENS if by_tokens else 1),
        max_length=run.model.longest,
    )


def model_shape(model: ModelConfig, *, on_cpu: bool) -> ModelShape:
    """What of a run's model decides costs; its vocabulary is padded already."""
    made, positions = model.megatron(), model.positions
    return ModelShape(
        family=model.family,
        hidden=model.hidden,
        heads=model.heads,
        kv_channels=model.kv_channels,
        ffn=model.ffn,
        vocabulary=model.vocabulary,
        query_groups=made.num_query_groups % made.num_attention_heads,
        gated=made.gated_linear_unit,
        fused=not on_cpu and (made.bias_activation_fusion or not made.gated_linear_unit),
        rms_norm=model.normalization == "RMSNorm",
        biases=made.add_bias_linear,
        qkv_bias=made.add_qkv_bias and not made.add_bias_linear,
        qk_norm=model.qk_layernorm,
        rotary=positions.kind == ROTARY,
        tied=model.tied,
        positions=model.max_positions if positions.kind == LEARNED else 0,
        relative_buckets=positions.relative_buckets if positions.kind == RELATIVE else 0,
        keeps_scores=not model.transformer_engine and model.attention is CoreAttention.MEGATRON,
        attention_dropout=made.attention_dropout > 0,
        hidden_dropout=made.hidden_dropout > 0,
        experts=model.experts,
    )


def describe_costs(run: RunConfig, costs: MeasuredCosts | AnalyticCosts) -> str:
    """Where a run's costs come from, and what they assume, for its log."""
    if isinstance(costs, MeasuredCosts):
        return f"{costs.load().name}, from {costs.path}"
    return (
        f"computed from the model's shape for {_assumed_device(run)}; to predict this machine, let it be measured"
        " (--dynapipe-calibrate 20, or `megatron-dynapipe profile` and --dynapipe-cost-model)"
    )


def _rates(run: RunConfig) -> DeviceRates:
    """Rates of this device by its name, else of a common one: micro-batches follow from them, and times in ms too."""
    rates = CPU_RATES if run.on_cpu else rates_of(torch.cuda.get_device_name(run.device)) or A100_RATES
    return msgspec.structs.replace(rates, element_bytes=run.model.dtype.itemsize)


def _assumed_device(run: RunConfig) -> str:
    """The device that computed costs are for."""
    if run.on_cpu:
        return "a common server CPU's core (assumed)"
    name = torch.cuda.get_device_name(run.device)
    return name if rates_of(name) else f"an A100 (assumed: {name} is not in the table of devices)"
