"""From a recipe of Megatron-Bridge, once Bridge has settled it, and its built model, to the settings of plans."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from megatron.core import parallel_state
from torch import nn

from megatron_dynapipe import cpu
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import GLOO_RULES, cuda_rules
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import ModelShape, model_of_layers
from megatron_dynapipe.costing.adapters import Adapters, described
from megatron_dynapipe.costing.pattern import without_stages
from megatron_dynapipe.costing.recipe import NAMES, recipe_flags
from megatron_dynapipe.costing.shape import megatron_arguments
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.bridge.capabilities import FREE, capabilities
from megatron_dynapipe.megatron.bridge.layers import AUTO, layers_of_recipe
from megatron_dynapipe.megatron.bridge.refusals import of_model, pattern_of
from megatron_dynapipe.megatron.entry import calibration
from megatron_dynapipe.megatron.equip.halves import modules_per_stage
from megatron_dynapipe.megatron.flags import machine
from megatron_dynapipe.megatron.models.config import model_state_bytes, planner_fields
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import LongSamples, SamplerSettings
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


def device_of_rank() -> torch.device:
    """The device of this rank, which Bridge has made the current one."""
    return torch.device("cpu") if cpu.is_enabled() else torch.device("cuda", torch.cuda.current_device())


def plan_inputs(
    config: "ConfigContainer",
    models: Sequence[nn.Module],
    control: ControlGroup,
    *,
    data: Path,
    iteration: int,
    costs: Path | None,
    long_samples: LongSamples,
    memory_limit_bytes: int | None,
    cluster: str,
    context_teams: int = 1,
) -> PlanInputs:
    """Everything plans are made from; every rank calls it, at the same point.

    Args:
        config: the recipe, as Bridge has settled it.
        models: this rank's chunks. Before they are built there are none: plans then have the recipe's own layers, and
            a model that lacks nothing.
        control: the group of all ranks.
        data: the dataset folder.
        iteration: the one with which training begins, or goes on.
        costs: a cost model file; None computes costs.
        long_samples: what becomes of samples that are too long.
        memory_limit_bytes: that plans may use of a device; None for what the cluster's file or the device says.
        cluster: as `planned`.
        context_teams: likewise.

    Raises:
        ConfigError, CostModelError, DataError: settings of plans do not go together, or a file cannot be read.
    """
    device = device_of_rank()
    shape = model_shape(config, on_cpu=device.type == "cpu")
    known = machine.known_costs(
        costs,
        shape,
        device,
        element_bytes=of_model(config).params_dtype.itemsize,
        max_size=max(config.train.global_batch_size, config.validation.eval_global_batch_size),
        max_length=config.model.seq_length,
    )
    on_cpu = device.type == "cpu"
    described = machine.cluster_of(cluster, device=device)
    limit = memory_limit_bytes or machine.device_memory_bytes(described, on_cpu=on_cpu)
    network = machine.network(known.load().links, described)
    rules = GLOO_RULES if on_cpu else cuda_rules(os.environ)
    given = {"memory_limit_bytes": limit, "network": network, "transfers": rules, "context_teams": context_teams}
    planner = _planner(config, models, control, shape, **given)
    splits = splits_of(config, long_samples, data, iteration)
    return PlanInputs(data_folder=str(data), splits=splits, planner=planner, costs=known)


def model_shape(config: "ConfigContainer", *, on_cpu: bool) -> ModelShape:
    """The numbers of a recipe's model that decide its costs."""
    places = (of_model(config), config.model)  # what the latter says of a name wins
    said = {name: getattr(place, name) for place in places for name in NAMES if hasattr(place, name)}
    shape = ModelShape.of_megatron(megatron_arguments(recipe_flags(said)), ModelFamily.GPT, on_cpu=on_cpu)
    return msgspec.structs.replace(shape, adapters=adapters_of(config))


def costs_file(config: "ConfigContainer", costs: str | Path, calibrate_s: float, **how: object) -> Path | None:
    """The cost model file that is named, or for "auto" that of measured costs; None where costs are computed."""
    if costs != AUTO:
        return Path(costs)
    return measured_costs(config, option="calibrate_s=", seconds=calibrate_s, **how)


def measured_costs(config: "ConfigContainer", **how: Any) -> Path | None:
    """The cost model file of a recipe's layers, its adapters in place; `how` is the rest for `calibration.measured`.

    None where no time is given for measuring, or where it failed.
    """
    if not how["seconds"]:
        return None
    device = machine.processor_and_cores() if cpu.is_enabled() else torch.cuda.get_device_name()
    saved = config.to_dict()
    causes = {name: str(saved.get(name)) for name in ("model", "mixed_precision")}
    causes |= {"adapters": described(adapters_of(config)), "device": device}
    modes = recompute_modes(config)
    shared = of_model(config).tensor_model_parallel_size
    with tempfile.TemporaryDirectory() as folder:
        config.to_yaml(f"{folder}/recipe.yaml")
        words = ["--model-config", f"{folder}/recipe.yaml"]
        return calibration.measured(words, causes=causes, recompute=modes, tensor_parallel=shared, **how)


def adapters_of(config: "ConfigContainer") -> Adapters | None:
    """The adapters that a recipe trains; None if it trains all weights. Raises ConfigError for an unknown kind."""
    if config.peft is None:
        return None
    return Adapters.of_recipe({"_target_": f".{type(config.peft).__name__}", **vars(config.peft)})


def recompute_modes(config: "ConfigContainer") -> tuple[Recompute, ...]:
    """The modes that plans choose among: the recipe's, or any.

    Layers of frozen weights whose input needs no gradient cannot be computed again as a whole: Bridge sees to it where
    the recipe asks for that mode alone.
    """
    asked = of_model(config).recompute_granularity
    if asked is not None:
        return (Recompute(asked),)
    return tuple(Recompute) if config.peft is None else (Recompute.NONE, Recompute.SELECTIVE)


def _planner(
    config: "ConfigContainer", models: Sequence[nn.Module], control: ControlGroup, shape: ModelShape, **of_machine: Any
) -> PlannerSettings:
    """Settings of plans: of the model, the layout, and the machine as they are given."""
    model = of_model(config)
    pattern = without_stages(pattern_of(config))
    stacks = model_of_layers(
        ModelFamily.GPT,
        len(pattern) or model.num_layers,
        expert_layers=shape.experts.layers if shape.experts else (),
        pattern=pattern,
    )
    if models:
        modules = modules_per_stage(models, control)
        of_model_built = capabilities(models, control) | {"model_state_bytes": _state(config, models, control)}
    else:
        modules = stacks.modules_of(layers_of_recipe(config))
        of_model_built = FREE
    if of_machine["context_teams"] > 1 and (of_model_built["slices"] == "off" or model.attention_dropout):
        raise ConfigError(
            f"context_teams={of_machine['context_teams']}: expected attention that takes pieces of samples, without"
            " dropout",
            hint="leave context_teams out, or set model.attention_dropout to 0",
        )
    return PlannerSettings(
        **planner_fields(model),
        model=stacks,
        data_parallel=parallel_state.get_data_parallel_world_size(),
        chunks=len(modules) // model.pipeline_model_parallel_size,
        modules_per_stage=modules,
        distributed_optimizer=config.ddp.use_distributed_optimizer,
        recompute=recompute_modes(config),
        **of_model_built,
        **of_machine,
    )


def _state(config: "ConfigContainer", models: Sequence[nn.Module], control: ControlGroup) -> tuple[int, ...]:
    """Memory of every pipeline rank's weights, gradients and optimizer states."""
    return model_state_bytes(
        models,
        of_model(config),
        control,
        optimizer=config.optimizer.optimizer,
        gradients_in_fp32=config.ddp.grad_reduce_in_fp32,
        shards=config.data_parallel_size if config.ddp.use_distributed_optimizer else 1,
    )


def splits_of(
    config: "ConfigContainer", long_samples: LongSamples, data: Path, iteration: int
) -> tuple[SplitSettings, ...]:
    """Train, and with evaluation valid and test where the dataset has samples for them."""
    meta = read_meta(data)

    def sampler(samples: int) -> SamplerSettings:
        return SamplerSettings(
            family=ModelFamily.GPT,
            seed=config.rng.seed,
            samples_per_iteration=samples,
            max_input_length=config.model.seq_length + 1,  # n tokens train n - 1 positions
            long_samples=long_samples,
            sides=meta.task_sides,
            labels=LossOn(meta.loss) is LossOn.TARGETS,
        )

    train = SplitSettings(
        name="train",
        sampler=msgspec.structs.replace(sampler(config.train.global_batch_size), task_rates=meta.task_rates),
        first_iteration=iteration,
        first_sample=iteration * config.train.global_batch_size,
        iterations=max(config.train.train_iters - iteration, 0),
    )
    if not (batches := config.validation.eval_iters):
        return (train,)
    evaluated = [
        SplitSettings(name=name, sampler=sampler(config.validation.eval_global_batch_size), evaluation=batches)
        for name in evaluated_splits(data)
    ]
    return (train, *evaluated)


def evaluated_splits(data: Path) -> list[str]:
    """The splits of a dataset folder that have samples to evaluate on."""
    there = read_meta(data).split_samples
    return [name for name in ("valid", "test") if there[name]]
