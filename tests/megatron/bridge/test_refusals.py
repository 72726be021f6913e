"""What recipes may not ask for, and datasets of another tokenizer; no Megatron-Bridge is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.data.identity import fingerprint
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder, write_meta
from megatron_dynapipe.megatron.bridge.refusals import check_recipe, checked_dataset
from tests.helpers.random_dataset import make_dataset, word_tokenizer


class GPTModelProvider(SimpleNamespace):
    """A class of the name that Bridge's has."""


class HybridModelProvider(SimpleNamespace):
    """Likewise."""


class DistillationProvider(GPTModelProvider):
    """Likewise."""


class T5ModelProvider(SimpleNamespace):
    """Likewise."""


EXPERTS = {"model__num_moe_experts": 4}


def recipe(**changes: Any) -> Any:
    """The parts of a recipe that are looked at, with some attributes changed: `model__fp8="hybrid"`."""
    model = {"seq_length": 64, "pipeline_model_parallel_size": 2}
    parts: dict[str, Any] = {
        "model": GPTModelProvider(**model),
        "mixed_precision": "bf16_mixed",
        "dist": SimpleNamespace(use_decentralized_pg=False, use_megatron_fsdp=False, use_torch_fsdp2=False),
        "ddp": SimpleNamespace(use_megatron_fsdp=False),
        "dataset": SimpleNamespace(),
        "train": SimpleNamespace(rampup_batch_size=None),
        "logger": SimpleNamespace(timing_log_level=0),
        "inprocess_restart": None,
        "tokenizer": SimpleNamespace(tokenizer_model=None),
    }
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        if attribute:
            setattr(parts[part], attribute, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def test_a_recipe_that_asks_for_none_of_it_passes() -> None:
    check_recipe(recipe())
    check_recipe(recipe(model__moe_router_load_balancing_type="sinkhorn", model__moe_expert_capacity_factor=1.0))
    balanced = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "expert_model_parallel_size": 2}
    precision = SimpleNamespace(fp8="hybrid", fp8_recipe="tensorwise", fp8_param_gather=False)
    check_recipe(recipe(mixed_precision=precision, model__fp8_recipe="delayed"))
    check_recipe(recipe(**EXPERTS, **{f"model__{name}": value for name, value in balanced.items()}))


@pytest.mark.parametrize(
    ("changes", "named", "instead"),
    [
        ({"model": T5ModelProvider(seq_length=64)}, "a T5ModelProvider, ", "without plans"),
        ({"model": DistillationProvider(seq_length=64)}, "teacher and student", "without plans"),
        (
            {"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"},
            "mixed_precision.fp8_recipe = 'delayed'",
            "config.mixed_precision.fp8_recipe = 'tensorwise'",
        ),
        (
            {"mixed_precision": "bf16_with_fp8_current_scaling_mixed"},
            "mixed_precision.fp8_param_gather = 'bf16_with_fp8_current_scaling_mixed'",
            "fp8_param_gather = False, in an object of megatron.bridge.training.mixed_precision",
        ),
        (
            {"mixed_precision": SimpleNamespace(fp8="hybrid", fp8_recipe="delayed")},
            "replicas have different numbers of passes",
            "config.mixed_precision.fp8_recipe = 'tensorwise'",
        ),
        (
            {"mixed_precision": None, "model__fp8": "hybrid", "model__fp8_recipe": "delayed"},
            "config.model.fp8_recipe = 'delayed'",
            "config.model.fp8_recipe = 'tensorwise'",
        ),
        ({"mixed_precision": "bf16_with_nvfp4_mixed", "model__fp4": "e2m1"}, "quantise the weights", "fp4 = None"),
        ({"model__cuda_graph_impl": "local"}, "captured for one shape", "config.model.cuda_graph_impl = 'none'"),
        ({"model__enable_cuda_graph": True}, "captured for one shape", "config.model.enable_cuda_graph = False"),
        (
            {"model__context_parallel_size": 2},
            "which replicas share long samples",
            "config.model.context_parallel_size = 1",
        ),
        ({"model__mtp_num_layers": 1}, "averaged over micro-batches", "config.model.mtp_num_layers = None"),
        ({"dist__use_decentralized_pg": True}, "global process groups", "config.dist.use_decentralized_pg = False"),
        ({"ddp__use_megatron_fsdp": True}, "FSDP has another", "config.ddp.use_megatron_fsdp = False"),
        ({"dist__use_torch_fsdp2": True}, "FSDP has another", "config.dist.use_torch_fsdp2 = False"),
        (
            {"dataset__enable_offline_packing": True},
            "a number of samples",
            "offline_packing_specs = None",
        ),
        ({"train__rampup_batch_size": [8, 8, 100]}, "samples is fixed", "config.train.rampup_batch_size = None"),
        (
            {"comm_overlap": SimpleNamespace(tp_comm_overlap=True), "model__tensor_model_parallel_size": 2},
            "communication buffers",
            "config.comm_overlap.tp_comm_overlap = False",
        ),
        (
            {"comm_overlap": SimpleNamespace(defer_embedding_wgrad_compute=True)},
            "they would be lost",
            "config.comm_overlap.defer_embedding_wgrad_compute = False",
        ),
        (
            {**EXPERTS, "model__moe_router_load_balancing_type": "global_aux_loss"},
            "balances by what micro-batches hold",
            "config.model.moe_router_load_balancing_type = 'seq_aux_loss'",
        ),
        (
            {**EXPERTS, "model__moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
            "micro-batches hold",
            "seq_aux",
        ),
        ({**EXPERTS, "model__moe_expert_capacity_factor": 1.0}, "which tokens it drops", "capacity_factor = None"),
        ({**EXPERTS, "model__moe_input_jitter_eps": 0.1}, "noise is drawn by micro-batch", "jitter_eps = None"),
        ({**EXPERTS, "model__moe_token_dispatcher_type": "flex"}, "buffers are made once", "= 'alltoall'"),
        ({**EXPERTS, "model__moe_shared_expert_overlap": True}, "the exchange of tokens", "overlap = False"),
        (
            {**EXPERTS, "comm_overlap": SimpleNamespace(overlap_moe_expert_parallel_comm=True)},
            "its own schedule",
            "config.comm_overlap.overlap_moe_expert_parallel_comm = False",
        ),
        ({"logger__timing_log_level": 2}, "timing_log_level = 2", "config.logger.timing_log_level = 1"),
        (
            {"inprocess_restart": SimpleNamespace(enabled=True)},
            "starts again in place",
            "config.inprocess_restart.enabled = False",
        ),
    ],
)
def test_a_recipe_is_refused_by_name_with_what_to_set(changes: dict[str, Any], named: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check_recipe(recipe(**changes))
    assert refused.value.hint is not None and instead in refused.value.hint


def test_the_newer_form_of_a_model_is_asked_in_both_of_its_parts() -> None:
    inner = SimpleNamespace(pipeline_model_parallel_size=2, context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"config\.model\.transformer\.context_parallel_size = 2"):
        check_recipe(recipe(model=GPTModelProvider(seq_length=64, transformer=inner)))


def test_layers_without_known_costs_are_refused_before_anything_is_loaded() -> None:
    model = HybridModelProvider(seq_length=64, hybrid_layer_pattern="*-*E|*-M-")
    with pytest.raises(ConfigError, match="'M' at position 8 stands for Mamba layers, whose costs are not known"):
        check_recipe(recipe(model=model))
    model.hybrid_layer_pattern = "*-*E|*-*-"
    check_recipe(recipe(model=model))


def test_what_bridge_switches_off_by_itself_is_not_refused() -> None:
    check_recipe(recipe(comm_overlap=SimpleNamespace(tp_comm_overlap=True), model__tensor_model_parallel_size=1))


def test_a_sequence_length_is_a_multiple_of_eight() -> None:
    with pytest.raises(ConfigError, match="multiple of 8, got 60"):
        check_recipe(recipe(model__seq_length=60))


def test_a_dataset_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data", 4)
    own = tokenizer_folder(folder)
    meta = read_meta(folder)
    fields = {name: getattr(meta, name) for name in meta.__struct_fields__}
    write_meta(folder, type(meta)(**fields | {"tokenizer": fingerprint(own)}))
    assert checked_dataset(recipe(tokenizer__tokenizer_model=str(own)), str(folder)) == folder
    assert checked_dataset(recipe(tokenizer__tokenizer_model="org/model-of-the-hub"), folder) == folder
    assert checked_dataset(recipe(), None) is None
    word_tokenizer(tmp_path / "other", 300)
    with pytest.raises(DataError, match="whose samples were encoded by another"):
        checked_dataset(recipe(tokenizer__tokenizer_model=str(tmp_path / "other")), folder)
