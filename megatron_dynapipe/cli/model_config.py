"""`--model-config`: a model's kind and sizes from a run file of Megatron's flags, a HuggingFace `config.json`, or the
YAML that a recipe of Megatron-Bridge is saved as.

The file is all that is needed: a flag next to it may only say the same. What costs do not model is refused by name.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from megatron_dynapipe.config import expand, load_yaml, words_of
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily, target_positions
from megatron_dynapipe.costing import Experts, ModelShape, family_of_flags
from megatron_dynapipe.costing.adapters import DEFAULT_DIM, Adapters, Kind
from megatron_dynapipe.costing.hugging_face import (
    megatron_flags,
    obstacle_in,
    required_size,
    size,
)
from megatron_dynapipe.costing.pattern import kinds_of_pattern
from megatron_dynapipe.costing.recipe import measured_flags, model_of, recipe_flags
from megatron_dynapipe.costing.shape import megatron_arguments, megatron_fields
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.flags.planning_flags import positive

RUN_FILES = (".yaml", ".yml")

_NOT_MODELLED = (
    *("mtp-num-layers", "experimental-attention-variant", "is-hybrid-model", "moe-latent-size", "fp8-format"),
    *("heterogeneous-layers-config-path", "fp4-format"),
    *("context-parallel-size", "expert-tensor-parallel-size", "fp32-residual-connection"),
)
"""Flags of layers that computed costs do not know."""

_SIZES = (
    *("hidden-size", "num-layers", "num-attention-heads", "kv-channels", "ffn-hidden-size", "num-query-groups"),
    *("padded-vocab-size", "vocab-size", "make-vocab-size-divisible-by", "max-position-embeddings", "seq-length"),
    *("relative-attention-num-buckets", "num-experts", "moe-router-topk", "moe-ffn-hidden-size"),
    *("moe-shared-expert-intermediate-size", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim"),
    "v-head-dim",
)


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a file describes it.

    Attributes:
        layers: of a GPT, or of a T5's encoder and decoder.
        lengths: most tokens of an input (with a GPT, of its target too), and of a target of a T5; None where no run
            file says so.
        shape: fields of `ModelShape` except the family; of those but the hidden size some may be missing.
        obstacle: what of it computed costs do not model; empty where there is nothing.
        data: the dataset whose vocabulary the model has; None where no run file names one.
        pattern: a HybridModel's, whose modules are its layers; empty for other models.
        is_recipe: whether it is a recipe of Megatron-Bridge.
    """

    model: ModelFamily
    layers: tuple[int, ...]
    lengths: tuple[int | None, int | None] = (None, None)
    shape: dict[str, Any]
    obstacle: str = ""
    data: Path | None = None
    pattern: str = ""
    is_recipe: bool = False


def take_model_config(args: argparse.Namespace) -> None:
    """Set what the command line leaves open from the file of `--model-config`.

    Raises:
        ConfigError: as `read_model`, or a flag says something else than the file.
    """
    model = read_model(args.model_config)
    names = ("encoder_layers", "decoder_layers") if model.model.is_encoder_decoder else ("layers",)
    said = {"model": model.model, "hidden_size": model.shape["hidden"]}
    said |= zip(names, model.layers, strict=True)
    for name, value in said.items():
        flag = getattr(args, name)
        if flag is None:
            setattr(args, name, value)
        elif flag != value:
            raise ConfigError(
                f"expected --{name.replace('_', '-')} {value}, as in {args.model_config}, got {flag}",
                hint="leave the flag out: the file says it",
            )
    _check_adapters(args, model.shape.get("adapters"))
    args.pattern = model.pattern
    args.model_file = model
    args.run_lengths = model.lengths


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the adapters that are trained."""
    add = parser.add_argument
    add("--peft", choices=get_args(Kind), help="train adapters of all linear layers, in Megatron-Bridge, alone")
    add("--peft-dim", type=positive, metavar="N", help=f"width of the adapters (default: {DEFAULT_DIM})")


def _check_adapters(args: argparse.Namespace, recipe: Adapters | None) -> None:
    """Refuse flags of adapters that say something else than a recipe."""
    if recipe is None:
        return
    for name, value in (("peft", recipe.kind), ("peft_dim", recipe.dim)):
        if (flag := getattr(args, name)) not in (None, value):
            raise ConfigError(
                f"expected --{name.replace('_', '-')} {value}, as in {args.model_config}, got {flag}",
                hint="leave the flag out: the file says it",
            )


def adapters_of(args: argparse.Namespace) -> Adapters | None:
    """The adapters that are trained, as completed arguments say them; None where all weights are.

    Raises:
        ConfigError: a width was given without a kind.
    """
    file: ModelFile | None = getattr(args, "model_file", None)
    of_file: Adapters | None = None if file is None else file.shape.get("adapters")
    if of_file is not None:
        return of_file
    if args.peft is not None:
        return Adapters(kind=args.peft, dim=args.peft_dim or DEFAULT_DIM)
    if args.peft_dim is not None:
        raise ConfigError("--peft-dim goes with --peft, which was not given", hint="pass --peft lora or --peft dora")
    return None


def given_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """`ModelShape`'s fields, except the family, as completed arguments say them; some may be missing."""
    file: ModelFile | None = getattr(args, "model_file", None)
    shape = {"hidden": args.hidden_size} if file is None else dict(file.shape)
    if (adapters := adapters_of(args)) is not None:
        shape["adapters"] = adapters
    return shape


def is_recipe(args: argparse.Namespace) -> bool:
    """Whether completed arguments name a recipe of Megatron-Bridge."""
    file: ModelFile | None = getattr(args, "model_file", None)
    return file is not None and file.is_recipe


def trains_in_bridge(args: argparse.Namespace) -> bool:
    """Whether completed arguments name a model that Megatron-Bridge trains, of modules that are its own."""
    return is_recipe(args) or adapters_of(args) is not None


def run_words(args: argparse.Namespace) -> list[str]:
    """The flags of the run file that --model-config names; none of another file."""
    file: Path | None = args.model_config
    is_run_file = file is not None and file.suffix in RUN_FILES and not is_recipe(args)
    return expand(["--dynapipe-config", str(file)]) if is_run_file else []


def measured_words(args: argparse.Namespace) -> list[str]:
    """The flags under which the layers of a recipe are built; the arguments know its kind and adapters afterwards.

    Raises:
        ConfigError: --model-config names no recipe of Megatron-Bridge, or a flag says something else than it.
    """
    path: Path = args.model_config
    args.model_file = read_model(path)
    if args.model not in (None, args.model_file.model):
        raise ConfigError(f"expected --model {args.model_file.model}, as in {path}, got {args.model}")
    args.model = args.model_file.model
    _check_adapters(args, args.model_file.shape.get("adapters"))
    try:
        return words_of(measured_flags(_loaded(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None


def experts_of(args: argparse.Namespace) -> Experts | None:
    """The model's experts; raises ConfigError where they cannot be shared as the arguments ask."""
    experts: Experts | None = given_numbers(args).get("experts")
    shared = args.expert_parallel
    count = 1 if experts is None else experts.count
    if count % shared or args.data_parallel % shared:
        raise ConfigError(
            f"expected --expert-parallel to divide {count} experts and {args.data_parallel} replicas, got {shared}",
            hint="take experts from the model's file: --model-config FILE",
        )
    return experts


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The whole model for computed costs, which its file describes.

    Raises:
        ConfigError: there is no file, it lacks a number, or the model has what is not modelled.
    """
    file: ModelFile | None = getattr(args, "model_file", None)
    if file is None:
        raise ConfigError(
            "expected a whole model for --cost-model analytic, got its layers and hidden size",
            hint="name a run file, a recipe or a config.json that has all of it: --model-config FILE",
        )
    if file.obstacle:
        raise ConfigError(
            f"costs are not computed for {file.obstacle}, in {args.model_config}",
            hint="measure them: megatron-dynapipe profile",
        )
    shape = given_numbers(args)
    if "vocabulary" not in shape and (folder := args.data or file.data) is not None:
        shape |= {"vocabulary": read_meta(folder).vocabulary_size, "vocabulary_multiple": 128}
    if missing := [name for name in ("heads", "ffn", "vocabulary") if name not in shape]:
        raise ConfigError(
            f"expected {', '.join(missing)} of the model in {args.model_config}, for --cost-model analytic, found none",
            hint="add what is missing; of a dataset that --data names, the vocabulary is taken",
        )
    return ModelShape(family=args.model, **shape)


def read_model(path: Path) -> ModelFile:
    """The model that a file describes.

    Raises:
        ConfigError: it cannot be read, is none of the three kinds, or lacks a size.
    """
    values = _loaded(path)
    try:
        if (of_recipe := model_of(values)) is not None:
            model = _of_run_file(recipe_flags(of_recipe))
            adapters = {"adapters": Adapters.of_recipe(values["peft"])} if values.get("peft") else {}
            return msgspec.structs.replace(model, is_recipe=True, shape=model.shape | adapters)
        if "model_type" not in values:
            return _of_run_file(values)
        model = _of_run_file(flags := megatron_flags(values))
        obstacle = obstacle_in(values)
        known = {"hidden"} if obstacle else model.shape.keys() - ({"ffn"} if "ffn-hidden-size" not in flags else ())
        return msgspec.structs.replace(model, obstacle=obstacle, shape={name: model.shape[name] for name in known})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from None


def _loaded(path: Path) -> dict[str, object]:
    """The mapping that a file holds; raises ConfigError."""
    try:
        loaded = load_yaml(path)  # JSON is YAML
    except OSError as error:
        raise ConfigError(f"cannot read the model's configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"expected {path} to be YAML or JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected {path} to be a mapping, got {type(loaded).__name__}")
    return {str(name): value for name, value in loaded.items()}


def _of_run_file(flags: Mapping[str, Any]) -> ModelFile:
    required_size(flags, "hidden-size")
    checked = {name: size(flags, name) for name in _SIZES}
    unknown = [
        name for name in _NOT_MODELLED if flags.get(name) not in (None, False, 0, "") and str(flags[name]) != "1"
    ]
    family = family_of_flags(flags)
    pattern = str(flags.get("hybrid-layer-pattern") or "")
    # n tokens of a sequence train n - 1 positions
    longest = _length(flags, "seq-length", 0 if family.is_encoder_decoder else 1)
    longest_target = None
    layers: tuple[int, ...] = (len(kinds_of_pattern(pattern)),) if pattern else ()
    if family.is_encoder_decoder:
        layers = tuple(required_size(flags, f"{stack}-num-layers", "num-layers") for stack in ("encoder", "decoder"))
        longest_target = _length(flags, "decoder-seq-length", -target_positions(family, 0))
    folder = str(flags.get("dynapipe-data") or "")
    return ModelFile(
        model=family,
        layers=layers or (required_size(flags, "num-layers"),),
        lengths=(longest, longest_target),
        shape=megatron_fields(megatron_arguments({**flags, **checked})),
        obstacle=", ".join(unknown),
        data=Path(folder) if folder and Path(folder).is_dir() else None,
        pattern=pattern,
    )


def _length(flags: Mapping[str, Any], name: str, more: int) -> int | None:
    """The most tokens that fit the positions of a run; None where the file does not say."""
    positions = size(flags, name)
    return None if positions is None else max(positions + more, 1)
