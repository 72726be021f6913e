"""What a recipe may not ask for in a planned run: refused by name, with the reason, before anything is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.core.units import LENGTH_MULTIPLE
from megatron_dynapipe.data.identity import fingerprint
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder

_DIFFERENT_COUNTS = "replicas run different numbers of micro-batches"
_SHAPES = "micro-batches have shapes of their own"
_BALANCED = ("none", "aux_loss", "seq_aux_loss")
"""What balances experts by sums over positions or samples, or by the iteration before."""
_NOISE = ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased")
_MODELS = ("GPTModelProvider", "HybridModelProvider", "GPTModelConfig", "HybridModelConfig")
"""Classes of Bridge whose models plans can run, by name: to import them is to import all of Bridge."""


def of_model(config: Any) -> Any:
    """The part of a recipe that holds the transformer's numbers: the model's provider, or a part of its newer form."""
    return getattr(config.model, "transformer", config.model)


def _precision(config: Any) -> str:
    """The name of a low precision that the recipe trains in; empty for none."""
    mixed = config.mixed_precision
    if isinstance(mixed, str):
        return next((name for name in ("fp8", "fp4") if name in mixed or f"nv{name}" in mixed), "")
    places = (mixed, of_model(config))
    return next((name for name in ("fp8", "fp4") for place in places if getattr(place, name, None)), "")


def _has_graphs(config: Any) -> bool:
    model = of_model(config)
    implementation = getattr(model, "cuda_graph_impl", None) or "none"
    return implementation != "none" or bool(getattr(model, "enable_cuda_graph", False))


def _of_experts(name: str, default: Any = None) -> Callable[[Any], Any]:
    """Reads an attribute of the transformer of a recipe with experts; the default of one without."""
    return lambda config: getattr(of_model(config), name, default) if _has_experts(config) else default


def _has_experts(config: Any) -> bool:
    return bool(getattr(of_model(config), "num_moe_experts", None))


def _balances_by_micro_batch(config: Any) -> bool:
    """Whether routers are balanced by what a whole micro-batch, or several, hold."""
    kinds = _of_experts("moe_router_load_balancing_type", "none")(config)
    return not {*(kinds.split() if isinstance(kinds, str) else kinds)} <= {*_BALANCED}


def _overlaps_exchanges(config: Any) -> bool:
    places = (of_model(config), getattr(config, "comm_overlap", None))
    return any(getattr(place, "overlap_moe_expert_parallel_comm", False) for place in places)


_REFUSED: tuple[tuple[Callable[[Any], object], str, str], ...] = (
    (
        lambda config: not any(kind.__name__ in _MODELS for kind in type(config.model).__mro__),
        "a model that is no GPT or Hybrid model of Bridge: plans know no other",
        "train it without plans",
    ),
    (
        _precision,
        f"fp8 or fp4: their scales are agreed on in every pass, and {_DIFFERENT_COUNTS}",
        'config.mixed_precision = "bf16_mixed"',
    ),
    (_has_graphs, f"CUDA graphs: they are recorded for one shape, and {_SHAPES}", 'model.cuda_graph_impl = "none"'),
    (
        lambda config: getattr(of_model(config), "context_parallel_size", 1) > 1,
        "context parallelism: planned rows are not divided over ranks",
        "model.context_parallel_size = 1",
    ),
    (
        lambda config: getattr(of_model(config), "mtp_num_layers", None),
        "multi-token prediction: its loss is averaged over micro-batches",
        "model.mtp_num_layers = None",
    ),
    (
        lambda config: "istillation" in type(config.model).__name__ or getattr(config.model, "teacher", None),
        "distillation: teacher and student pass two states between stages",
        "train it without plans",
    ),
    (
        lambda config: config.dist.use_decentralized_pg,
        "dist.use_decentralized_pg: planned stages find one another by Megatron's global process groups",
        "dist.use_decentralized_pg = False",
    ),
    (
        lambda config: config.dist.use_megatron_fsdp or config.dist.use_torch_fsdp2 or config.ddp.use_megatron_fsdp,
        f"FSDP: its ranks gather weights in every pass, and {_DIFFERENT_COUNTS}",
        "ddp.use_distributed_optimizer = True",
    ),
    (
        lambda config: getattr(config.dataset, "enable_offline_packing", False),
        "samples that are packed ahead of time: plans pack whole samples into rows",
        "dataset.enable_offline_packing = False and dataset.offline_packing_specs = None",
    ),
    (
        lambda config: config.train.rampup_batch_size is not None,
        "train.rampup_batch_size: plans count iterations of one size",
        "train.rampup_batch_size = None",
    ),
    (
        _balances_by_micro_batch,
        f"balancing of experts by anything but {', '.join(_BALANCED)}: gradients would depend on the plan",
        'model.moe_router_load_balancing_type = "seq_aux_loss"',
    ),
    (
        _of_experts("moe_expert_capacity_factor"),
        "a capacity of experts: which tokens are dropped would depend on the plan",
        "model.moe_expert_capacity_factor = None",
    ),
    (
        lambda config: any(_of_experts(name)(config) for name in _NOISE),
        f"{', '.join(_NOISE)}: noise is drawn by micro-batch",
        "model.moe_input_jitter_eps = None and model.moe_router_force_load_balancing = False",
    ),
    (
        lambda config: _of_experts("moe_token_dispatcher_type")(config) == "flex",
        f"flex dispatchers: their buffers are made once, and {_SHAPES}",
        'model.moe_token_dispatcher_type = "alltoall"',
    ),
    (
        lambda config: _of_experts("moe_shared_expert_overlap")(config) or _overlaps_exchanges(config),
        "shared experts, or exchanges of tokens, that overlap with other work: they run alongside what plans order",
        "model.moe_shared_expert_overlap = False and comm_overlap.overlap_moe_expert_parallel_comm = False",
    ),
    (
        lambda config: config.logger.timing_log_level >= 2 and of_model(config).pipeline_model_parallel_size > 1,
        "logger.timing_log_level 2: Bridge's step function would wait for the device, on which receives wait",
        "logger.timing_log_level = 1",
    ),
    (
        lambda config: config.inprocess_restart is not None and config.inprocess_restart.enabled,
        "in-process restarts: a planned run is started anew",
        "inprocess_restart.enabled = False",
    ),
)
"""Whether a recipe asks for it; what and why not; what to set."""


def check_recipe(config: Any) -> None:
    """Raise ConfigError for the first thing in a recipe that a planned run does not support."""
    for asks, what, instead in _REFUSED:
        if asks(config):
            raise ConfigError(f"a planned run does not support {what}", hint=instead)
    length = config.model.seq_length
    if length % LENGTH_MULTIPLE:
        raise ConfigError(f"expected model.seq_length to be a multiple of {LENGTH_MULTIPLE}, got {length}")


def checked_dataset(config: Any, dataset: str | Path | None) -> Path | None:
    """A dataset's folder, its tokenizer compared with the recipe's, as far as that is a folder; None for none.

    Raises:
        DataError: they differ, or the dataset is missing or damaged.
    """
    if dataset is None:
        return None
    folder = Path(dataset).absolute()
    meta = read_meta(folder)
    named = config.tokenizer.tokenizer_model
    if not meta.tokenizer or named is None or not Path(named).is_dir():
        return folder
    if (actual := fingerprint(Path(named))) != meta.tokenizer:
        raise DataError(
            f"expected a dataset of the recipe's tokenizer {named} (fingerprint {actual}), got {folder}, whose samples"
            f" were encoded by another (fingerprint {meta.tokenizer})",
            hint=f"set tokenizer.tokenizer_model = {str(tokenizer_folder(folder))!r} if the model knows it, or prepare"
            " the dataset again with the recipe's",
        )
    return folder
