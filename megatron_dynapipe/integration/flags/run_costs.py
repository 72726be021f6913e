"""What layers cost in a run: what the file of `--dynapipe-cost-model` says, else what a device's rates make."""

import argparse
import dataclasses

import msgspec
import torch

from megatron_dynapipe.costing import A100_RATES, CPU_RATES, ModelShape
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.costing.file import check_measured_model
from megatron_dynapipe.costing.format import located
from megatron_dynapipe.integration.flags import machine
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.models.config import ModelConfig
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts

LAYER_COSTS = (
    *("hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "num_query_groups", "swiglu"),
    "dynapipe_activation",
    *("seq_length", "decoder_seq_length", "max_position_embeddings", "padded_vocab_size", "global_batch_size"),
    *("normalization", "position_embedding_type", "add_bias_linear", "untie_embeddings_and_output_weights"),
    *("tensor_model_parallel_size", "sequence_parallel", "params_dtype", "transformer_impl", "dynapipe_attention"),
    *("attention_dropout", "hidden_dropout", "accumulate_allreduce_grads_in_fp32", "attention_backend"),
)
"""Arguments that layers' costs depend on."""
_MOST_BY_TOKENS = 4096
"""Samples of a micro-batch at most, where an iteration has any number of them."""


def costs_of(
    args: argparse.Namespace, model: ModelConfig, shape: ModelShape, device: torch.device
) -> MeasuredCosts | AnalyticCosts:
    """The costs of a cost model file, read here; without one, those by this device's rates, else by a common one's."""
    if args.dynapipe_cost_model is not None:
        costs = MeasuredCosts(path=str(located(args.dynapipe_cost_model).absolute()))
        fields = msgspec.structs.asdict(shape)
        tensor_parallel = args.tensor_model_parallel_size
        check_measured_model(costs.load().file, fields, tensor_parallel=tensor_parallel)
        return costs
    rates = CPU_RATES if device.type == "cpu" else rates_of(torch.cuda.get_device_name(device)) or A100_RATES
    by_tokens = args.tokens_per_global_batch is not None
    return AnalyticCosts(
        shape=shape,
        rates=msgspec.structs.replace(rates, element_bytes=model.dtype.itemsize),
        max_size=max(args.global_batch_size, args.eval_global_batch_size, _MOST_BY_TOKENS if by_tokens else 1),
        max_length=model.longest,
    )


def with_named_costs(run: RunConfig, args: argparse.Namespace) -> RunConfig:
    """The same run by the costs of the file that `--dynapipe-cost-model` names now: its start has measured them.

    Raises:
        CostModelError: the file cannot be read, or is of another model.
    """
    costs = costs_of(args, run.model, run.shape, run.device)
    cluster = machine.cluster_of(args.dynapipe_cluster, device=run.device)
    planner = msgspec.structs.replace(run.planner, network=machine.network(costs.load().links, cluster))
    inputs = msgspec.structs.replace(run.inputs, costs=costs, planner=planner)
    return dataclasses.replace(run, inputs=inputs, calibrate_s=0.0)
