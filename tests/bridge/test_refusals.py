"""What recipes may not ask for, and datasets of another tokenizer; no Megatron-Bridge is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dynapipe.bridge.refusals import check_recipe, checked_dataset
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.data.identity import fingerprint
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder, write_meta
from tests.helpers.random_dataset import make_dataset, word_tokenizer


class GPTModelProvider(SimpleNamespace):
    """A class of the name that Bridge's has."""


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
    check_recipe(recipe(**EXPERTS, **{f"model__{name}": value for name, value in balanced.items()}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": T5ModelProvider(seq_length=64)}, "no GPT or Hybrid model"),
        ({"mixed_precision": "bf16_with_fp8_delayed_scaling_mixed"}, "fp8"),
        ({"mixed_precision": SimpleNamespace(fp8="hybrid")}, "fp8"),
        ({"mixed_precision": None, "model__fp8": "hybrid"}, "fp8"),
        ({"model__cuda_graph_impl": "transformer_engine"}, "CUDA graphs"),
        ({"model__enable_cuda_graph": True}, "CUDA graphs"),
        ({"model__context_parallel_size": 2}, "context parallelism"),
        ({"model__mtp_num_layers": 1}, "multi-token prediction"),
        ({"model": DistillationProvider(seq_length=64)}, "distillation"),
        ({"dist__use_decentralized_pg": True}, "use_decentralized_pg"),
        ({"ddp__use_megatron_fsdp": True}, "FSDP"),
        ({"dataset__enable_offline_packing": True}, "packed ahead of time"),
        ({"train__rampup_batch_size": [8, 8, 100]}, "rampup_batch_size"),
        ({**EXPERTS, "model__moe_router_load_balancing_type": "global_aux_loss"}, "balancing of experts"),
        ({**EXPERTS, "model__moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "balancing of experts"),
        ({**EXPERTS, "model__moe_expert_capacity_factor": 1.0}, "a capacity of experts"),
        ({**EXPERTS, "model__moe_input_jitter_eps": 0.1}, "noise is drawn by micro-batch"),
        ({**EXPERTS, "model__moe_token_dispatcher_type": "flex"}, "flex dispatchers"),
        ({**EXPERTS, "model__moe_shared_expert_overlap": True}, "overlap with other work"),
        ({"comm_overlap": SimpleNamespace(overlap_moe_expert_parallel_comm=True)}, "overlap with other work"),
        ({"logger__timing_log_level": 2}, "timing_log_level 2"),
        ({"inprocess_restart": SimpleNamespace(enabled=True)}, "in-process restarts"),
    ],
)
def test_a_recipe_is_refused_by_name_with_what_to_set(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        check_recipe(recipe(**changes))
    assert refused.value.hint


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
