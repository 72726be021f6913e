"""From a command line to a planned run, and to the arguments of Megatron's `pretrain`."""

import argparse
import contextlib
import copy
import functools
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.models.base import compose_hooks

from megatron_dynapipe.config import early_flags
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import LayerSplit, parse_layer_split
from megatron_dynapipe.megatron.entry import calibration, start
from megatron_dynapipe.megatron.entry.failure import process_groups
from megatron_dynapipe.megatron.entry.kept_splits import choose_or_recall
from megatron_dynapipe.megatron.entry.preflight import check_data, check_for_all, settle_evaluations
from megatron_dynapipe.megatron.entry.required import check_required
from megatron_dynapipe.megatron.entry.resume_record import split_to_keep
from megatron_dynapipe.megatron.entry.script import Script, ScriptRun
from megatron_dynapipe.megatron.equip.built import decoder_only, t5_provider
from megatron_dynapipe.megatron.execution.step_functions import STEPS
from megatron_dynapipe.megatron.flags import command_line
from megatron_dynapipe.megatron.flags.layer_split import set_stages
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.megatron.hooks import replacements
from megatron_dynapipe.megatron.models.t5_stage import embedding_ranks
from megatron_dynapipe.megatron.run.start_clock import StartClock
from megatron_dynapipe.megatron.supply.same_flags import check_same_flags, comparable
from megatron_dynapipe.outputs import say
from megatron_dynapipe.report import COST_FILE
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.start_store import from_rank_0

_SETTLED = ("padded_vocab_size", "local_rank", "dynapipe_cost_model")
"""Arguments that are settled after Megatron's checks: by its tokenizer, by the devices, and by what was measured."""


@contextlib.contextmanager
def planned(family: ModelFamily | str, fit: command_line.Fit | None = None) -> Iterator[dict[str, Any]]:
    """For the length of a block, Megatron's `pretrain` runs planned iterations of what the command line says.

    Args:
        family: a GPT, which may be a HybridModel, or a T5 staged over the pipeline.
        fit: changes the parsed flags.

    Yields:
        What `pretrain` takes.

    Raises:
        ConfigError, DataError: something is wrong with the flags or the data.
    """
    run, arguments = planned_run(ModelFamily(family), fit)
    with process_groups(), run, replacements.installed(run):
        yield arguments
        run.print_report()


def planned_run(
    family: ModelFamily, fit: command_line.Fit | None = None, *, run_type: type[ScriptRun] = ScriptRun
) -> tuple[ScriptRun, dict[str, object]]:
    """The run, which gives the schedule, and what Megatron's `pretrain` takes; as `planned`."""
    clock = StartClock()
    args, config, flags = _checked(family, fit, clock)
    is_gpt = family is ModelFamily.GPT
    layout = config.planner.layout
    if is_gpt and config.plans_layer_split:
        # Megatron has checked the arguments with an even split of the same form.
        set_stages(args, layout.layers_per_stage)
    run = run_type(Script(config), clock=clock)
    model = decoder_only(args, layout) if is_gpt else None  # Megatron's loop builds it
    hooks = _before_wrapping(run, flags)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ModelConfig", module="megatron")  # which a T5 does not have
        container = pretrain_cfg_container_from_args(args, model)
    arguments = {
        "cfg_container": container,
        "train_valid_test_dataset_provider": run.datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": STEPS[family],
    }
    if model is not None:
        model.pre_wrap_hooks += hooks
        return run, arguments
    provider = _with_hooks(t5_provider(args, layout), hooks)
    ranks = {"get_embedding_ranks": embedding_ranks, "get_position_embedding_ranks": embedding_ranks}
    return run, arguments | ranks | {"model_provider": provider}


def _with_hooks(build: Callable[..., object], hooks: Sequence[Callable[[list[object]], list[object]]]) -> object:
    """A model provider, and what is done with each chunk that it has built."""

    def provide(**stage: object) -> Any:
        return compose_hooks(hooks)([build(**stage)])[0]

    return provide


def _before_wrapping(run: ScriptRun, flags: Mapping[str, str]) -> list[Callable[[list[Any]], list[Any]]]:
    """What is done with built chunks before Megatron wraps them.

    Ranks that no store connects compare their flags: now they have process groups.
    """
    if not start.ranks_stand_alone():
        return [run.count]
    compare = functools.cache(lambda: check_same_flags(flags, ControlGroup(timeout_s=run.timeout_s)))

    def compared(chunks: list[Any]) -> list[Any]:
        compare()
        return chunks

    return [run.count, compared]


def _checked(
    family: ModelFamily, fit: command_line.Fit | None, clock: StartClock
) -> tuple[argparse.Namespace, RunConfig, Mapping[str, str]]:
    """Megatron's namespace, the run's whole configuration and its flags as text; raises on all ranks or on none."""
    words = sys.argv[1:]
    clock.ends("imports")
    timeout_s = early_flags(words).dynapipe_timeout_s
    flags: dict[str, str] = {}
    unchecked: list[tuple[argparse.Namespace, Sequence[argparse.Action]]] = []

    def noting(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> None:
        flags.update(comparable(args))
        if fit is not None:
            fit(args, family, known)
        unchecked.append((copy.deepcopy(args), known))

    args, run = start.start_together(lambda: _parsed(family, words, noting, fit), timeout_s=timeout_s, name="flags")

    def set_chunks(chunks: int) -> None:
        """Have Megatron's namespace be as if its flag asked for so many virtual stages on every rank."""
        parsed, known = unchecked.pop()
        parsed.num_virtual_stages_per_pipeline_rank = chunks
        command_line.settle(parsed, family, known)
        command_line.check_by_megatron(parsed, rank=args.rank, world_size=args.world_size)
        settled = {name: getattr(args, name) for name in _SETTLED}
        vars(args).update(vars(parsed) | settled)  # the namespace that Megatron's global variables hold

    def check() -> RunConfig:
        start.compare_flags(flags, timeout_s=timeout_s)
        clock.ends("arguments")
        return _settled(run, words, set_chunks, clock)

    return args, start.start_together(check, timeout_s=timeout_s), flags


def _parsed(
    family: ModelFamily, words: Sequence[str], noting: command_line.Fit, fit: command_line.Fit | None
) -> tuple[argparse.Namespace, RunConfig]:
    check_required(words, family)
    args, run = command_line.parse(family, words, noting)
    if args.dynapipe_elastic and fit is None:
        raise ConfigError(
            "expected --dynapipe-elastic with an entry script that chooses the layout first, got another",
            hint="end the script as pretrain_gpt_multitask.py ends",
        )
    return args, run


def _settled(run: RunConfig, words: Sequence[str], set_chunks: Callable[[int], None], clock: StartClock) -> RunConfig:
    """The run, with costs and layers per stage that are measured and planned where they are not given."""
    args = run.args
    measured = None
    if run.calibrate_s > 0:
        from_rank_0("check of the data", lambda: _data_checked(run), timeout_s=run.sources.timeout_s)
        measured = calibration.measured_costs(run, words)
    if measured is not None:
        args.dynapipe_cost_model = measured
        run = calibration.with_measured_costs(run)
    clock.ends("costs")
    if run.plans_layer_split:
        chunks = run.planner.chunks
        run = run.with_layers_per_stage(_planned_layer_split(run))
        if run.planner.chunks != chunks:  # of several Megatron checks and settles more
            set_chunks(run.planner.chunks)
    clock.ends("layer split")
    if (folder := run.checkpoints.resumed()) and folder.is_dir():
        args.pretrained_checkpoint = None  # Megatron would begin anew where all to go on from is not persistent
    check_for_all(run)
    settle_evaluations(run)
    if measured is not None and args.rank == 0 and measured.parent != run.sources.report_folder.absolute():
        shutil.copyfile(measured, run.sources.report_folder / COST_FILE)
    clock.ends("checks of data and memory")
    return run


def _data_checked(run: RunConfig) -> str:
    kept = _kept_split(run) if run.plans_layer_split else None
    check_data(run if kept is None else run.with_layers_per_stage(kept))
    return "done"


def _kept_split(run: RunConfig) -> LayerSplit | None:
    """The layers per stage of the checkpoint to go on from, where it loads in no others."""
    stages = run.planner.pipeline_parallel if run.plans_chunks else run.planner.layout.virtual_stages
    return split_to_keep(run.checkpoints, run.planner.model.layers, stages)


def _planned_layer_split(run: RunConfig) -> LayerSplit:
    """The layers per virtual stage that are predicted to be fastest, or that the run's checkpoint has."""

    def choose() -> str:
        layer_split = _kept_split(run)
        why = " (the checkpoint loads in no others)"
        if layer_split is None:
            layer_split, is_kept = choose_or_recall(run)
            why = " (chosen at an earlier start of the same run)" if is_kept else ""
        text = ",".join(map(str, layer_split))
        say(f"layers per stage: {text}{why}")
        return text

    layer_split = from_rank_0("layer-split", choose, timeout_s=run.sources.timeout_s)
    return parse_layer_split(layer_split, expected="numbers of layers")
