"""What the entry scripts hand to Megatron's `pretrain`: checked arguments, providers, a step function, a session."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_dynapipe.config import EarlyFlags, early_flags
from megatron_dynapipe.cost import parse_split
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.digests import check_archives, check_digests
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.entry import calibration, start
from megatron_dynapipe.integration.entry.checkpoint_lock import lock_checkpoints
from megatron_dynapipe.integration.entry.session import Session
from megatron_dynapipe.integration.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.integration.execution.row_injection import RowInjection
from megatron_dynapipe.integration.execution.step_functions import gpt_batch, gpt_step, t5_batch, t5_step
from megatron_dynapipe.integration.execution.task_losses import with_task_sums
from megatron_dynapipe.integration.flags import command_line, from_megatron
from megatron_dynapipe.integration.flags.layer_split import chosen_layer_split, megatron_layout
from megatron_dynapipe.integration.flags.preflight import check_data, check_run
from megatron_dynapipe.integration.flags.resume_record import loaded, resumed, split_to_keep
from megatron_dynapipe.integration.flags.run_config import Progress, RunConfig
from megatron_dynapipe.integration.models.layers import T5Split
from megatron_dynapipe.integration.models.providers import (
    ModelProvider,
    gpt_provider,
    t5_provider,
    t5_required_fields,
)
from megatron_dynapipe.runtime.start_store import from_rank_0
from megatron_dynapipe.units import ModelFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, ready to be handed to Megatron.

    Attributes:
        args: Megatron's namespace, for Megatron alone.
        session: gives the datasets and the schedule; a context manager around the run.
        model_provider: builds this rank's part of the model.
        forward_step: one micro-batch through it.
        embedding_ranks: of one pipeline's ranks, those whose copies of word and position embeddings Megatron is told
            of; None is its own choice.
    """

    args: argparse.Namespace
    session: Session
    model_provider: ModelProvider
    forward_step: ForwardStep
    embedding_ranks: Callable[[Sequence[int]], list[int]] | None = None


def t5_run() -> Run:
    """A T5 staged over the pipeline, from the command line; raises ConfigError and DataError."""
    args, run = _checked(ModelFamily.T5)
    split = T5Split(run.planner.layout)

    def required_fields() -> RequiredFields:
        return t5_required_fields(split.of_rank(parallel_state.get_pipeline_model_parallel_rank()))

    session = Session(
        run,
        progress=partial(_progress, args),
        required_fields=required_fields,
        make_batch=partial(t5_batch, row_format=run.model.row_format),
    )
    return Run(
        args=args,
        session=session,
        model_provider=t5_provider(run.model, split),
        forward_step=t5_step,
        embedding_ranks=split.embedding_ranks,
    )


def gpt_run() -> Run:
    """Megatron's own GPT, from the command line; raises ConfigError and DataError."""
    args, run = _checked(ModelFamily.GPT)
    if run.plans_layer_split and run.planner.layers_per_stage is not None:
        # Megatron has checked the arguments with an even split of the same form.
        args.pipeline_model_parallel_layout = megatron_layout(run.planner.layers_per_stage)

    def required_fields() -> RequiredFields:
        return RequiredFields(
            tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            labels=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            rows_alone=True,
        )

    session = Session(
        run,
        progress=partial(_progress, args),
        required_fields=required_fields,
        make_batch=partial(gpt_batch, explicit_mask=run.model.takes_mask, row_format=run.model.row_format),
    )
    provider = gpt_provider(run.model, run.divided_layout)
    return Run(args=args, session=session, model_provider=provider, forward_step=gpt_step)


def _progress(args: argparse.Namespace) -> Progress:
    """Megatron keeps its counters in its namespace."""
    return Progress(iteration=args.iteration, valid_samples=args.consumed_valid_samples)


def _checked(family: ModelFamily) -> tuple[argparse.Namespace, RunConfig]:
    """Megatron's namespace and the run's whole configuration; raises on all ranks or on none."""
    flags = sys.argv[1:]

    def check() -> tuple[argparse.Namespace, RunConfig]:
        args, run = command_line.parse(family, flags)
        if args.dynapipe_elastic:
            raise ConfigError(
                "expected --dynapipe-elastic with an entry script that chooses the layout first, got another",
                hint="end the script as pretrain_gpt_multitask.py ends",
            )
        if (folder := resumed(run.checkpoints)) and folder.is_dir():
            args.pretrained_checkpoint = None  # Megatron would begin anew where all to go on from is not persistent
        measured = None
        if run.calibrate_s > 0:
            from_rank_0("check of the data", lambda: _data_checked(run), timeout_s=run.timeout_s)
            measured = calibration.measured_costs(run, flags)
        if measured is not None:
            args.dynapipe_cost_model = measured
            run = from_megatron.run_config(args, family)
        if run.plans_layer_split:
            run = _plan_layer_split(run)
        _preflight(run)
        if measured is not None and run.rank == 0:
            shutil.copyfile(measured, run.report_folder / "cost-model.json")
        return args, run

    return start.start_together(check, timeout_s=early_flags(flags, EarlyFlags).dynapipe_timeout_s)


def _data_checked(run: RunConfig) -> str:
    check_data(run)
    return "done"


def _preflight(run: RunConfig) -> None:
    if start.checks_for_all():
        check_run(run)
    if folder := loaded(run.checkpoints):
        check_digests(folder, rank=run.rank, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    if run.checkpoints.local_folder is not None:
        check_archives(run.checkpoints.local_folder)
    lock_checkpoints(run)


def _plan_layer_split(run: RunConfig) -> RunConfig:
    """The run with the layers per stage that are predicted to be fastest, or that its checkpoint has."""

    def choose() -> str:
        layers = run.model.encoder_layers + run.model.decoder_layers
        kept = split_to_keep(run.checkpoints, layers, run.planner.layout.virtual_stages)
        found = ",".join(map(str, kept or chosen_layer_split(run)))
        print(f"layers per stage: {found}{' (the checkpoint loads in no others)' if kept else ''}", flush=True)
        return found

    split = from_rank_0("layer-split", choose, timeout_s=run.timeout_s)
    return run.with_layers_per_stage(parse_split(split, expected="numbers of layers"))


def patched_session(args: argparse.Namespace) -> Session:
    """A session under a patched checkout's own `pretrain_gpt.py`; raises ConfigError.

    That script takes a batch on the first tensor-parallel rank alone and broadcasts it, with the attention mask if
    `--create-attention-mask-in-dataloader` (the default) asks for one.
    """
    run = from_megatron.run_config(args, ModelFamily.GPT)
    start.start_together(partial(_preflight, run), timeout_s=run.timeout_s)

    def required_fields() -> RequiredFields:
        takes = parallel_state.get_tensor_model_parallel_rank() == 0
        return RequiredFields(
            tokens=takes and parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            labels=takes and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            # The script broadcasts labels over tensor-parallel ranks in the shape of tokens.
            rows_alone=parallel_state.get_tensor_model_parallel_world_size() == 1,
        )

    masked = args.create_attention_mask_in_dataloader
    make_batch = partial(gpt_batch, explicit_mask=masked, row_format=run.model.row_format)

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

    return Session(
        run,
        progress=partial(_progress, args),
        required_fields=required_fields,
        make_batch=broadcastable,
        wrap_step=wrap,
    )


def pretrain_arguments(run: Run, session: Session) -> dict[str, Any]:
    """The keyword arguments of Megatron's `pretrain`: 0.18 and 0.19 have them in different orders."""
    return {
        "cfg_container": pretrain_cfg_container_from_args(run.args),
        "train_valid_test_dataset_provider": session.datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": run.forward_step,
        "model_provider": session.counting(run.model_provider),
        "get_embedding_ranks": run.embedding_ranks,
        "get_position_embedding_ranks": run.embedding_ranks,
    }
