"""What planned passes would get wrong, for every host: one table of names of Megatron's configuration.

Megatron's namespace and the configuration objects of Megatron-Bridge have these names alike. What is not here, planned
passes do as Megatron does; whatever Megatron itself refuses, it refuses by its own checks.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.models.eight_bits import MULTIPLES

RECOMPUTE_MODULES = ("core_attn", "mlp", "moe", "shared_experts")
"""Values of Megatron's `--recompute-modules` that can be switched for each micro-batch."""
Asked = Callable[[str], Any]
"""The value of a name, None where there is no such name."""


class Refusal(NamedTuple):
    """Names that may not be asked for.

    Attributes:
        names: arguments or fields of configuration.
        why: the reason.
        unasked: their value if nobody asks, where that is not false.
        taken: words that may be asked for; empty for none.
        only_with: another name, without which these ask for nothing.
    """

    names: str
    why: str
    unasked: object = None
    taken: tuple[str, ...] = ()
    only_with: str = ""

    def asked(self, value_of: Asked) -> Iterator[str]:
        """The names, of these, that are asked for."""
        for name in self.names.split() if not self.only_with or value_of(self.only_with) else ():
            value = value_of(name)
            if value and value != self.unasked and not self._takes(value):
                yield name

    def _takes(self, value: Any) -> bool:
        words = value.split() if isinstance(value, str) else value
        return bool(self.taken) and {*words} <= {*self.taken}


PASSES = (
    Refusal("hybrid_context_parallel dynamic_context_parallel", "plans say which ranks share rows, if any do"),
    Refusal(
        "fp8_recipe",
        "its scales are agreed on in every pass, but replicas have different numbers of passes",
        taken=tuple(MULTIPLES),
        only_with="fp8",
    ),
    Refusal(
        "fp4 fp8_output_proj fp8_param_gather fp4_param_gather fp8_dot_product_attention fp8_multi_head_attention"
        " te_precision_config_file",
        "planned passes quantise the weights of layers from their own type once an iteration, and nothing else",
    ),
    Refusal("cuda_graph_impl", "a graph is captured for one shape, and micro-batches have many", "none"),
    Refusal("enable_cuda_graph external_cuda_graph", "a graph is captured for one shape, and micro-batches have many"),
    Refusal(
        "use_megatron_fsdp use_torch_fsdp2",
        "planned passes hold back the gradient reduction of DDP, and FSDP has another",
    ),
    Refusal(
        "delay_wgrad_compute defer_embedding_wgrad_compute overlap_dispatch_backward_with_experts_wgrad",
        "weight gradients put off are computed by Megatron's own schedules alone, so they would be lost",
    ),
)
"""For whatever runs planned passes, a loop of the user's own too, whose losses and step function are its own matter."""

EVERYWHERE = (
    *PASSES,
    Refusal("context_parallel_size", "plans say which replicas share long samples (--dynapipe-context-teams)", 1),
    Refusal("mtp_num_layers", "its loss is averaged over micro-batches"),
    Refusal(
        "tp_comm_overlap",
        "its communication buffers are made once, for one length, and micro-batches have many lengths",
    ),
    Refusal("inference_rng_tracker", "random states in CUDA graphs cannot be set for each layer"),
    Refusal(
        "distribute_saved_activations",
        "it replaces a layer's input, which may be a received tensor that the stage still hands on",
    ),
    Refusal(
        "cpu_offloading_num_layers",
        "plans know nothing of activations that leave the device, and hold several micro-batches at once",
    ),
    Refusal(
        "fine_grained_activation_offloading",
        "it counts passes in the order of Megatron's own schedules, and starts anew with each of theirs",
    ),
    Refusal(
        "qk_clip log_max_attention_logit",
        "it clips by attention's largest logit, which the attention of planned runs does not record",
    ),
    Refusal("rampup_batch_size step_batch_size_schedule", "a plan's number of samples is fixed"),
    Refusal(
        "inprocess_restart", "a process that starts again in place would meet the process groups and plans it has left"
    ),
)
"""For every host of a run."""

EXPERTS = (
    Refusal(
        "moe_router_load_balancing_type",
        "it balances by what micro-batches hold, so that gradients would depend on the plan; aux_loss, seq_aux_loss,"
        " none and the bias of experts do not",
        taken=("none", "aux_loss", "seq_aux_loss"),
    ),
    Refusal(
        "moe_token_dispatcher_type",
        "its buffers are made once, and micro-batches have many lengths; use alltoall",
        taken=("allgather", "alltoall"),
    ),
    Refusal(
        "moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity",
        "which tokens it drops, or pads, depends on the micro-batch",
    ),
    Refusal(
        "moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased",
        "its noise is drawn by micro-batch",
    ),
    Refusal("moe_shared_expert_overlap", "plans know nothing of what runs during the exchange of tokens"),
    Refusal("overlap_moe_expert_parallel_comm", "it brings its own schedule"),
)
"""For every host, where there are experts."""

SCRIPTS = (
    Refusal(
        "data_path train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path mock_data"
        " fim_data use_varlen_dataset varlen_sbhd_validation varlen_mock_dataset_config_json sft"
        " sequence_packing_scheduler",
        "samples come from --dynapipe-data, in the rows of the plan",
    ),
    Refusal("vocab_size vocab_file merge_file vocab_extra_ids", "the vocabulary is that of the dataset's tokenizer"),
    Refusal("encoder_seq_length", "give --seq-length, the longest input"),
    Refusal(
        "reset_position_ids reset_attention_mask dataloader_inter_document_masking eod_mask_loss",
        "samples are kept apart already, and every target token counts",
    ),
    Refusal("phase_transition_iterations", "samples are counted from the start"),
    Refusal(
        "iterations_to_skip",
        "Megatron skips by taking one item per micro-batch, and an item is a whole planned iteration",
    ),
    Refusal("multiple_validation_sets", "there is one validation split"),
    Refusal("perform_rl_step", "it trains on what a model generates, not on planned samples"),
    Refusal("logits_save_dir logits_load_dir", "it keeps logits by their place in Megatron's own dataset"),
    Refusal("moe_use_upcycling", "it builds a dense model in addition to the run's, for which plans leave no room"),
    Refusal("moe_latent_size", "costs know no projections around experts"),
    Refusal(
        "moe_layer_recompute",
        "plans choose recomputation for each micro-batch; name the module with --recompute-modules moe",
    ),
    Refusal("check_for_spiky_loss", "sums over micro-batches of different sizes cannot be compared"),
    Refusal(
        "tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "replicas are counted without this axis",
        1,
    ),
    Refusal("use_tp_pp_dp_mapping", "plans take the ranks of a stage to lie side by side on a node"),
    Refusal("hybrid_override_pattern", "give --hybrid-layer-pattern"),
    Refusal("freeze_all_layers fake_process_group", "nothing would be trained"),
    Refusal("lazy_mpu_init", "process groups must exist when a run begins"),
    Refusal("yaml_cfg", "it replaces the command line, which is what is checked; pass --dynapipe-config FILE"),
)
"""For Megatron's own loop, in a patched checkout, too: what a command line asks for apart from the model."""

ENTRY_SCRIPTS = (
    Refusal(
        "experimental_attention_variant use_transformer_engine_op_fuser use_kitchen_attention"
        " use_grouped_gemm_for_dense_mlp is_hybrid_model heterogeneous_layers_config_path"
        " heterogeneous_layers_config_encoded_json spec",
        "costs know softmax attention and layers that are alike",
    ),
)
"""For models that the entry scripts build."""

LOCAL = (
    Refusal("fp8", "Megatron's local layers have no products in eight bits"),
    Refusal("layernorm_zero_centered_gamma", "PyTorch's norms have no weights around zero"),
    Refusal(
        "flash_attention_version fused_residual_rmsnorm batch_invariant_mode use_te_activation_func",
        "Megatron's local layers do not look at it",
    ),
    Refusal(
        "moe_grouped_gemm moe_permute_fusion moe_router_fusion use_grouped_gemm_for_shared_expert",
        "Megatron's local experts run one after another, and these are Transformer Engine's kernels",
    ),
)
"""For `--transformer-impl local`."""

T5 = (
    Refusal("hybrid_layer_pattern", "the layers of a T5 are two stacks"),
    Refusal(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split decoder_first_pipeline_num_layers"
        " decoder_last_pipeline_num_layers pipeline_model_parallel_layout",
        "it splits one stack, and a T5 has two; --dynapipe-layers-per-stage 5,3 says the layers of every stage",
    ),
    Refusal(
        "fp32_residual_connection",
        "its encoder's output is of the weights' type and its decoder's state of fp32, and a message has one type",
    ),
    Refusal("init_model_with_meta_device", "weights that stages share are made equal as they are built"),
    Refusal("no_rope_freq", "it counts layers from the beginning of one stack, and a T5 has two"),
    Refusal("multi_latent_attention qk_l2_norm", "its layers have plain attention"),
    Refusal("use_mup use_rope_scaling fp16_lm_cross_entropy", "the stages of a T5 do not look at it"),
)
"""For a T5."""


def first_asked(table: Sequence[Refusal], value_of: Asked) -> tuple[str, Refusal] | None:
    """The first name of a table that is asked for, and its row; None where nothing is."""
    return next(((name, row) for row in table for name in row.asked(value_of)), None)


def check(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> None:
    """Refuse arguments of Megatron's whose planned passes would train something else.

    Args:
        args: as parsed, not yet changed by Megatron's own checks.
        family: the model's.
        known: Megatron's own arguments, by which a name's flag is found.

    Raises:
        ConfigError: names the flag, the reason and what to do.
    """
    tables = [
        ("", (*EVERYWHERE, *SCRIPTS)),
        *([("", EXPERTS)] if args.num_experts else []),
        *([] if args.use_dynapipe else [(" outside a patched checkout", ENTRY_SCRIPTS)]),
        *([(" and --transformer-impl local", LOCAL)] if args.transformer_impl == "local" else []),
        *([(" for a T5", T5)] if family is ModelFamily.T5 else []),
    ]
    for where, table in tables:
        if (found := first_asked(table, lambda name: getattr(args, name, None))) is not None:
            name, row = found
            value = getattr(args, name)
            setters = [action for action in known if action.dest == name]
            setter = next((action for action in setters if action.const == value), None) or next(iter(setters), None)
            flag = f"--{name.replace('_', '-')}" if setter is None else flag_of(setter)
            raise ConfigError(f"{flag} cannot be used with DynaPipe{where}: {row.why}", hint=f"remove {flag}")


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's arguments as they are, whatever is added to it, or changed of its defaults, afterwards."""
    return [copy.copy(action) for action in parser._actions if action.dest != "help"]  # argparse has no public list


def flag_of(action: argparse.Action) -> str:
    """The first long name of an argument."""
    return next(name for name in action.option_strings if name.startswith("--"))
