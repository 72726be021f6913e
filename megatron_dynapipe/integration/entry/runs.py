"""What the entry scripts hand to Megatron's `pretrain`: checked arguments, providers, a step function, a session."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args

from megatron_dynapipe import config, cpu
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.data.meta import tokenizer_folder
from megatron_dynapipe.elastic.job import from_rank_0
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.entry import calibration, elastic_run, launch
from megatron_dynapipe.integration.entry.session import MakeBatch, Session
from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.integration.execution.row_injection import RowInjection
from megatron_dynapipe.integration.execution.step_functions import (
    check_losses,
    gpt_batch,
    gpt_step,
    t5_batch,
    t5_step,
)
from megatron_dynapipe.integration.execution.task_losses import with_task_sums
from megatron_dynapipe.integration.flags import arguments, placement, split_words
from megatron_dynapipe.integration.flags.layer_split import take_t5_layout
from megatron_dynapipe.integration.flags.model_state import StateBytes
from megatron_dynapipe.integration.flags.plan_inputs import (
    chosen_layer_split,
    plan_inputs,
    preview_inputs,
    state_dtype,
    train_iterations,
)
from megatron_dynapipe.integration.flags.preflight import check_run
from megatron_dynapipe.integration.flags.run_record import CheckpointRecords, non_persistent_folder, record_of
from megatron_dynapipe.integration.models import flags as model_flags
from megatron_dynapipe.integration.models.packed_rows import RowFormat
from megatron_dynapipe.integration.models.providers import (
    ModelProvider,
    gpt_provider,
    gpt_takes_mask,
    t5_provider,
    t5_required_fields,
    t5_split,
)
from megatron_dynapipe.units import ModelFamily

EmbeddingRanks = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, ready to be handed to Megatron.

    Attributes:
        args: Megatron's arguments, with DynaPipe's.
        session: gives the datasets and the schedule; a context manager around the run.
        model_provider: builds this rank's part of the model.
        forward_step: one micro-batch through it.
        embedding_ranks: of one pipeline's ranks, those with word embeddings; None is Megatron's own choice.
        position_embedding_ranks: those with position embeddings, likewise.
    """

    args: argparse.Namespace
    session: Session
    model_provider: ModelProvider
    forward_step: ForwardStep
    embedding_ranks: EmbeddingRanks | None = None
    position_embedding_ranks: EmbeddingRanks | None = None


def t5_run() -> Run:
    """A T5 staged over the pipeline, from the command line; raises ConfigError and DataError."""
    args, _ = _checked(ModelFamily.T5)
    split = t5_split(args)

    def required_fields() -> RequiredFields:
        return t5_required_fields(split, parallel_state.get_pipeline_model_parallel_rank())

    make_batch = partial(t5_batch, row_format=RowFormat.of(args))
    return Run(
        args=args,
        session=_session(args, ModelFamily.T5, required_fields=required_fields, make_batch=make_batch),
        model_provider=t5_provider(args, split),
        forward_step=t5_step,
        embedding_ranks=split.embedding_ranks,
        position_embedding_ranks=split.position_embedding_ranks,
    )


def gpt_run() -> Run:
    """Megatron's own GPT, from the command line; raises ConfigError and DataError."""
    args, chosen = _checked(ModelFamily.GPT)
    if chosen is not None:  # Megatron has checked the arguments with an even split of the same form.
        args.pipeline_model_parallel_layout = model_flags.megatron_layout(chosen)

    def required_fields() -> RequiredFields:
        return RequiredFields(
            tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            labels=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )

    make_batch = partial(gpt_batch, explicit_mask=gpt_takes_mask(args), row_format=RowFormat.of(args))
    return Run(
        args=args,
        session=_session(args, ModelFamily.GPT, required_fields=required_fields, make_batch=make_batch),
        model_provider=gpt_provider(args),
        forward_step=gpt_step,
    )


def _checked(family: ModelFamily) -> tuple[argparse.Namespace, tuple[int, ...] | None]:
    """Megatron's arguments and the planned layer split, if one was asked for; raises on all ranks or on none."""

    elastic_run.prepare(family)
    flags = sys.argv[1:]

    def check() -> tuple[argparse.Namespace, tuple[int, ...] | None]:
        args = parse(family)
        measures = args.dynapipe_cost_model is None and args.dynapipe_calibrate > 0
        if measures:
            args.dynapipe_cost_model = calibration.measured_costs(args, family, flags)
        chosen = _plan_layer_split(args, family)
        _preflight(args, family)
        if measures and args.rank == 0 and args.dynapipe_cost_model is not None:
            _report_calibration(args, family)
        return args, chosen

    return launch.start_together(check, timeout_s=float(config.value_of(sys.argv[1:], "dynapipe-timeout-s", "300")))


def _preflight(args: argparse.Namespace, family: ModelFamily) -> None:
    if launch.checks_for_all():
        settings = arguments.RunSettings.from_args(args)
        on_cpu = cpu.is_enabled()
        check_run(args, settings, preview_inputs(args, settings, family, on_cpu=on_cpu), on_cpu=on_cpu)
    elastic_run.lock_checkpoints(args)


def _report_calibration(args: argparse.Namespace, family: ModelFamily) -> None:
    """What measuring gained, into the log, and its costs among the run's records."""
    settings, on_cpu = arguments.RunSettings.from_args(args), cpu.is_enabled()
    calibration.record(args.dynapipe_cost_model, settings)
    measured, computed = (
        preview_inputs(args, each, family, on_cpu=on_cpu) for each in (settings, replace(settings, cost_model=None))
    )
    print(f"cost model: {calibration.gain(measured, computed.costs)}", flush=True)


def _plan_layer_split(args: argparse.Namespace, family: ModelFamily) -> tuple[int, ...] | None:
    """Replace `--dynapipe-layers-per-stage auto` by the split predicted to be fastest; None if it was not asked."""
    if args.dynapipe_layers_per_stage != model_flags.AUTO:
        return None

    def choose() -> str:
        settings = arguments.RunSettings.from_args(args)
        return ",".join(map(str, chosen_layer_split(args, settings, family, on_cpu=cpu.is_enabled())))

    split = from_rank_0("layer-split", choose, timeout_s=args.dynapipe_timeout_s)
    args.dynapipe_layers_per_stage = split
    if args.rank == 0:
        print(f"layers per stage: {split}", flush=True)
    return tuple(map(int, split.split(",")))


def patched_session(args: argparse.Namespace) -> Session:
    """A session under a patched checkout's own `pretrain_gpt.py`; raises ConfigError.

    That script takes a batch on the first tensor-parallel rank alone and broadcasts it, with the attention mask if
    `--create-attention-mask-in-dataloader` (the default) asks for one.
    """

    launch.start_together(partial(_preflight, args, ModelFamily.GPT), timeout_s=args.dynapipe_timeout_s)

    def required_fields() -> RequiredFields:
        takes = parallel_state.get_tensor_model_parallel_rank() == 0
        return RequiredFields(
            tokens=takes and parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            labels=takes and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )

    masked = args.create_attention_mask_in_dataloader
    make_batch = partial(gpt_batch, explicit_mask=masked, row_format=RowFormat.of(args))

    def broadcastable(host: HostMicroBatch, device: torch.device) -> DeviceBatch:
        batch = make_batch(host, device)
        mask = batch["attention_mask"]
        if mask is not None:
            mask = mask.expand(host.shape.size, -1, -1, -1).contiguous()
        elif masked:  # a packed row's is broadcast too, and then not looked at
            mask = torch.zeros(1, 1, *(host.shape.input_length,) * 2, dtype=torch.bool, device=device)
        return {**batch, "position_ids": batch["position_ids"].contiguous(), "attention_mask": mask}

    rows = RowInjection()

    def wrap(forward_step: ForwardStep) -> ForwardStep:
        return with_task_sums(rows.wrap(forward_step))

    return _session(args, ModelFamily.GPT, required_fields=required_fields, make_batch=broadcastable, wrap_step=wrap)


def parse(family: ModelFamily) -> argparse.Namespace:
    """Megatron's arguments from the command line and its run file, checked for what a planned run needs.

    Raises:
        ConfigError: the run file or a flag is wrong, or an option cannot be used with DynaPipe.
        CostModelError: the cost model's file cannot be read.
        DataError: there is no dataset where `--dynapipe-data` says.
    """
    parser = _extend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    sys.argv[1:] = config.expand(sys.argv[1:], arguments.switches(parser))
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--use-dynapipe"]  # it is for patched checkouts alone
    prepare_help(parser)
    early = parser.parse_args()
    settings = arguments.check(early, family)
    if (iterations := train_iterations(early, settings, family)) is not None:
        sys.argv += ["--train-iters", str(iterations)]
    sys.argv += split_words.layer_split_words(early, family)
    sys.argv += model_flags.words_for_megatron(parser.parse_args(), family)
    tokenizer = tokenizer_folder(settings.data)
    try:
        args: argparse.Namespace = parse_and_validate_args(
            extra_args_provider=_extend, args_defaults={"tokenizer_model": str(tokenizer)}
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(_refusal(error), hint="--help lists all flags") from error
    if not cpu.is_enabled():
        args.local_rank = placement.device_index(
            args.local_rank or 0, devices=torch.cuda.device_count(), backend=args.distributed_backend
        )
    model_flags.restore(args, early)
    if family is ModelFamily.T5:
        take_t5_layout(args)
    return args


def _refusal(error: Exception) -> str:
    """What Megatron's check of its arguments says, which may be no more than the line that fails."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"Megatron refuses these arguments: {str(error) or place.line} ({Path(place.filename).name}:{place.lineno})"


def prepare_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` print: on rank 0, and with the help texts of Megatron's in which a percent sign stands alone."""
    if os.environ.get("RANK", "0") != "0":
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    for action in parser._actions:  # argparse has no public list of its options
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    arguments.add_arguments(parser)
    return cpu.set_args_defaults(parser) if cpu.is_enabled() else parser


def _session(
    args: argparse.Namespace,
    family: ModelFamily,
    *,
    required_fields: Callable[[], RequiredFields],
    make_batch: MakeBatch,
    wrap_step: Callable[[ForwardStep], ForwardStep] = lambda step: step,
) -> Session:
    settings = arguments.RunSettings.from_args(args)
    on_cpu = cpu.is_enabled()
    return Session(
        settings,
        inputs=lambda: plan_inputs(args, settings, family, on_cpu=on_cpu),
        required_fields=required_fields,
        make_batch=make_batch,
        wrap_step=wrap_step,
        dtype=state_dtype(args),
        device=torch.device("cpu") if on_cpu else torch.device("cuda", args.local_rank or 0),
        seed=args.seed,
        metrics_interval=args.tensorboard_log_interval,
        state=StateBytes.of(args),
        save_record=_saving_record(args, settings, family),
        check_losses=check_losses if args.check_for_nan_in_loss_and_grad and not args.use_dynapipe else lambda _: None,
        shares_tasks=args.use_dynapipe,
    )


def _saving_record(
    args: argparse.Namespace, settings: arguments.RunSettings, family: ModelFamily
) -> Callable[[], None]:
    """What puts this run's record into each checkpoint that it saves, once the checkpoint is complete."""
    if args.save is None or args.rank != 0:
        return lambda: None
    record = record_of(args, settings, preview_inputs(args, settings, family, on_cpu=cpu.is_enabled()))
    emergency = non_persistent_folder(args, Path(args.save))
    folders = [Path(args.save), *([] if emergency is None else [emergency])]
    records = [CheckpointRecords(folder, record) for folder in folders]

    def update() -> None:
        for each in records:
            each.update()

    return update


def pretrain_arguments(run: Run, session: Session) -> dict[str, Any]:
    """The keyword arguments of Megatron's `pretrain`: 0.18 and 0.19 have them in different orders."""
    return {
        "cfg_container": pretrain_cfg_container_from_args(run.args),
        "train_valid_test_dataset_provider": session.datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": run.forward_step,
        "model_provider": session.counting(run.model_provider),
        "get_embedding_ranks": run.embedding_ranks,
        "get_position_embedding_ranks": run.position_embedding_ranks,
    }
