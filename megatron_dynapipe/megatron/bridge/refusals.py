"""What a recipe may not ask for in a planned run: refused by name, with the reason, before anything is loaded.

Most of it is the table of all hosts (`flags.refusals`), whose names Bridge's configuration objects have, too.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.costing.pattern import kinds_of_pattern
from megatron_dynapipe.data.identity import fingerprint
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder
from megatron_dynapipe.megatron.flags.refusals import EVERYWHERE, EXPERTS, Refusal, first_asked
from megatron_dynapipe.megatron.models.eight_bits import length_multiple

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from megatron.core.transformer.transformer_config import TransformerConfig

BRIDGE = (
    Refusal("use_decentralized_pg", "planned stages find one another by Megatron's global process groups"),
    Refusal("enable_offline_packing", "plans pack whole samples into rows, and a batch is a number of samples"),
)
"""For Megatron-Bridge's loop alone."""
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names under which a Hybrid recipe has the modules of its model."""
_MODELS = ("GPTModelProvider", "HybridModelProvider", "GPTModelConfig", "HybridModelConfig")
"""Classes of Bridge whose models plans can run, by name: to import them is to import all of Bridge."""
_PLACES = ("mixed_precision", "comm_overlap", "ddp", "dist", "train", "dataset")
"""Parts of a recipe that have names of the table, in addition to its model."""
_INSTEAD = {
    "config.mixed_precision.fp8_param_gather": "config.mixed_precision.fp8_param_gather = False, in an object of"
    " megatron.bridge.training.mixed_precision in place of a name",
    "config.mixed_precision.fp4": 'config.mixed_precision = "bf16_mixed"',
    "config.dataset.enable_offline_packing": "config.dataset.enable_offline_packing = False and"
    " config.dataset.offline_packing_specs = None; config.train.global_batch_size counts samples then, not rows",
}
"""What to set, where that is more than the name's value if nobody asks."""


def of_model(config: "ConfigContainer") -> "TransformerConfig":
    """The part of a recipe that holds the transformer's numbers: the model's provider, or a part of its newer form."""
    return getattr(config.model, "transformer", config.model)


def pattern_of(config: "ConfigContainer") -> str:
    """The modules of a Hybrid recipe's model, with stages if it has them; empty for a GPT."""
    patterns = (getattr(place, name, None) for place in (config.model, of_model(config)) for name in PATTERNS)
    return next(filter(None, patterns), "")


def check_recipe(config: "ConfigContainer") -> None:
    """Raise ConfigError for the first thing in a recipe that a planned run does not support."""
    for place, why, instead in _of_bridge(config):
        raise ConfigError(f"{place} cannot be used in a planned run: {why}", hint=instead)
    has_experts = bool(getattr(of_model(config), "num_moe_experts", None))
    table = (*EVERYWHERE, *BRIDGE, *(EXPERTS if has_experts else ()))
    found = first_asked(table, partial(_value, config))
    if found is not None:
        name, row = found
        place, value = next(_asked(config, name))
        unasked = False if value is True else row.taken[-1] if row.taken else row.unasked
        hint = _INSTEAD.get(place, f"{place} = {unasked!r}")
        raise ConfigError(f"{place} = {value!r} cannot be used in a planned run: {row.why}", hint=f"set {hint}")
    if pattern := pattern_of(config):
        kinds_of_pattern(pattern)
    length, multiple = config.model.seq_length, length_multiple(of_model(config))
    if length % multiple:
        raise ConfigError(f"expected model.seq_length to be a multiple of {multiple}, got {length}")


def _value(config: "ConfigContainer", name: str) -> Any:
    return next((value for _, value in _asked(config, name)), None)


def _asked(config: "ConfigContainer", name: str) -> Iterator[tuple[str, Any]]:
    """The place where a recipe has something under a name, and what."""
    shared = of_model(config)
    if name == "tp_comm_overlap" and getattr(shared, "tensor_model_parallel_size", 1) == 1:
        return  # which Bridge switches off by itself
    if name == "inprocess_restart" and config.inprocess_restart is not None and config.inprocess_restart.enabled:
        yield "config.inprocess_restart.enabled", True
    precision = _named_precision(config)
    if name.startswith("fp8") and getattr(precision, "fp8", None):  # which Bridge puts over the model's
        if value := getattr(precision, name, None):
            yield f"config.mixed_precision.{name}", value
        return
    parts = {place: getattr(config, place, None) for place in _PLACES}
    of_transformer = {} if shared is config.model else {"model.transformer": shared}
    for place, part in {"model": config.model, **of_transformer, **parts}.items():
        named = part if isinstance(part, str) and name in part else None  # "bf16_with_nvfp4_mixed"
        if value := named or getattr(part, name, None):
            yield f"config.{place}.{name}", value


def _named_precision(config: "ConfigContainer") -> Any:
    """A recipe's mixed precision; of a name with eight bits what it stands for, as all of them gather so."""
    precision = config.mixed_precision
    if not isinstance(precision, str) or "fp8" not in precision:
        return precision
    recipe = next((recipe for words, recipe in _RECIPES.items() if words in precision), "delayed")
    return SimpleNamespace(fp8=precision, fp8_recipe=recipe, fp8_param_gather=precision)


_RECIPES = {"current_scaling": "tensorwise", "subchannel_scaling": "blockwise", "mxfp8": "mxfp8"}


def _of_bridge(config: "ConfigContainer") -> Iterator[tuple[str, str, str]]:
    """What is more than one name: what a recipe has, why not, and what to do."""
    kind = type(config.model)
    if not any(base.__name__ in _MODELS for base in kind.__mro__):
        yield f"config.model, a {kind.__name__},", "plans know GPT and Hybrid models of Bridge", "train without plans"
    if "istillation" in kind.__name__ or getattr(config.model, "teacher", None):
        yield "distillation", "teacher and student pass two states between stages", "train without plans"
    if config.logger.timing_log_level >= 2 and of_model(config).pipeline_model_parallel_size > 1:
        why = "Bridge's step function would wait for the device, on which receives wait"
        yield "config.logger.timing_log_level = 2 on several stages", why, "set config.logger.timing_log_level = 1"


def checked_dataset(config: "ConfigContainer", dataset: str | Path | None) -> Path | None:
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
