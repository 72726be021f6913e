"""Hosts of Megatron's own loop: an entry script, whose models are ours to check, and a patched checkout's script."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.collate import HostMicroBatch, RequiredFields
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.entry import start
from megatron_dynapipe.megatron.entry.about import about
from megatron_dynapipe.megatron.entry.preflight import check_for_all, settle_evaluations
from megatron_dynapipe.megatron.entry.resume_record import CheckpointRecords, checkpoint_records
from megatron_dynapipe.megatron.entry.resumed_place import resumed_inputs
from megatron_dynapipe.megatron.equip.labels import for_all_positions
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch, ForwardStep
from megatron_dynapipe.megatron.execution.step_functions import MakeBatch, check_losses, gpt_batch
from megatron_dynapipe.megatron.execution.task_losses import with_task_sums
from megatron_dynapipe.megatron.flags import from_megatron
from megatron_dynapipe.megatron.flags.run_config import RunConfig, label_flops
from megatron_dynapipe.megatron.hooks.metrics import count_flops, write_metrics, write_task_losses
from megatron_dynapipe.megatron.models.config import model_state_bytes, state_dtype
from megatron_dynapipe.megatron.run.host import Host
from megatron_dynapipe.megatron.run.run import Run
from megatron_dynapipe.megatron.run.start_clock import StartClock
from megatron_dynapipe.runtime import platform_of
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.runtime.memory import reserve
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.settings import PlanInputs

logger = logging.getLogger(__name__)


class Script(Host):
    """Megatron's `pretrain`, started by an entry script.

    Args:
        config: the run as it was asked for; its arguments say where training goes on once a checkpoint has been loaded.
    """

    names_tasks = True

    def __init__(self, config: RunConfig) -> None:
        args = config.args
        self.config = config
        self.sources = config.sources
        self.files = config.files
        self.device = config.device
        self.dtype = state_dtype(config.transformer)
        self.weights_dtype = config.transformer.params_dtype
        self.seed = config.sampler.seed
        self.log_interval = args.log_interval
        self.reserves_all_memory = args.dynapipe_reserve_all_memory
        self.corrects = args.dynapipe_correct == "on"
        self.flops_of_label = label_flops(config.planner, config.shape)
        self._args = args
        self._records: Sequence[CheckpointRecords] = ()

    def inputs(self, control: ControlGroup, models: Sequence[nn.Module], *, evaluates: bool) -> PlanInputs:
        """The run's, with the model state that was counted on every pipeline rank: the most of any replica's."""
        inputs = resumed_inputs(self.config)
        state = model_state_bytes(
            models,
            self.config.transformer,
            control,
            optimizer=self._args.optimizer,
            gradients_in_fp32=self._args.accumulate_allreduce_grads_in_fp32,
            shards=inputs.planner.data_parallel if inputs.planner.distributed_optimizer else 1,
        )
        planner = msgspec.structs.replace(inputs.planner, model_state_bytes=state)
        return msgspec.structs.replace(inputs, planner=planner)

    def opened(self, control: ControlGroup, inputs: PlanInputs) -> None:
        """Checkpoints get the run's record from now on; memory that is to be reserved is taken."""
        if control.rank == 0:
            self._records = checkpoint_records(self.config, inputs)
        if self.reserves_all_memory:
            control.run_on_all(lambda: reserve(inputs.planner.memory_limit_bytes, self.device))

    def about(self, inputs: PlanInputs, models: Sequence[nn.Module]) -> Mapping[str, str]:
        """What the flags say of it."""
        return about(self.config)

    def corrected(self, correction: Correction) -> None:
        """Checkpoints hold it."""
        for records in self._records:
            records.correct(correction.percents)

    def begin_iteration(self) -> None:
        """Megatron may have saved a checkpoint since the last one."""
        self.record_checkpoint()

    def record_checkpoint(self) -> None:
        """Put the run's record into a checkpoint that has been saved since the last call."""
        try:
            for records in self._records:
                records.update()
        except OSError as error:
            logger.warning("cannot write what the last checkpoint was trained on: %s", error)

    def close(self) -> None:
        """At the run's end: the last checkpoint's record and digests are written."""
        self.record_checkpoint()
        for records in self._records:
            records.finish()

    def check(self, losses: Sequence[dict[str, Tensor]]) -> None:
        """Check losses as Megatron's own step functions do."""
        if self._args.check_for_nan_in_loss_and_grad:
            check_losses(losses)

    def count_lengths(self, item: PlannedIteration) -> bool:
        """Tell Megatron."""
        return count_flops(item, self.device)

    def write_metrics(self, item: PlannedIteration, events: Sequence[Event]) -> None:
        """Write to Megatron's TensorBoard and Weights & Biases."""
        write_metrics(item, events, platform=platform_of(self.device), interval=self._args.tensorboard_log_interval)

    def write_task_losses(self, losses: Mapping[str, float], iteration: int) -> None:
        """Likewise."""
        write_task_losses(losses, iteration)


class Checkout(Script):
    """A patched checkout's own `pretrain_gpt.py`, with its model and its step function.

    That script takes a batch on the first tensor-parallel rank and broadcasts it, with the attention mask if
    `--create-attention-mask-in-dataloader` (the default) asks for one. All ranks have it, too: the one on the branch
    dev takes each rank's own, and `n` positions with labels are taken out of what was broadcast (`equip.labels`).
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._masked: bool = config.args.create_attention_mask_in_dataloader

    def required(self, models: Sequence[nn.Module]) -> RequiredFields:
        """The whole rank's fields: its script reads a batch once for all chunks."""
        return RequiredFields(
            tokens=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
            labels=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
            samples=bool(self._args.num_experts) and not self.config.planner.label_experts,
        )

    def make_batch(self, models: Sequence[nn.Module]) -> MakeBatch:
        """With what is broadcast in one piece."""
        made = partial(gpt_batch, explicit_mask=self._masked)

        def broadcastable(host: HostMicroBatch, device: torch.device) -> DeviceBatch:
            batch = for_all_positions(made(host, device))
            mask = batch["attention_mask"]
            if mask is not None:
                mask = mask.expand(host.shape.size, -1, -1, -1).contiguous()
            elif self._masked:  # a packed row's is broadcast too, and then not looked at
                mask = torch.zeros(1, 1, *(host.shape.input_length,) * 2, dtype=torch.bool, device=device)
            return {**batch, "position_ids": batch["position_ids"].contiguous(), "attention_mask": mask}

        return broadcastable

    def wrapped(self, step: ForwardStep) -> ForwardStep:
        """The script's own step function, with losses by task."""
        return with_task_sums(step)

    def check(self, losses: Sequence[dict[str, Tensor]]) -> None:
        """The script's own step function does."""


class ScriptRun(Run):
    """The run of a script: Megatron asks it for datasets, and builds its model by a provider that it counts."""

    host: Script

    def __init__(self, host: Script, *, clock: StartClock | None = None) -> None:
        super().__init__(host, clock=clock)
        self._modules: list[nn.Module] = []

    def __exit__(self, *error: Any) -> None:
        self.host.close()
        super().__exit__(*error)

    def count(self, chunks: list[Any]) -> list[Any]:
        """Take in chunks that Megatron has built and not yet wrapped: plans leave room for them."""
        self.clock.ends("Megatron's initialisation and model")
        self._modules += chunks
        return chunks

    def datasets(self, _samples: object, vp_stage: int | None = None) -> tuple[object, object, object]:
        """Megatron's dataset provider for `--dataloader-type external`: the iterators of the three splits.

        Chunks of a rank share them; the schedule takes one item per iteration, whatever their number.
        """
        if self.inputs is None:
            self.clock.ends("optimizer and checkpoint")
            self.start(self._modules)
        return self.items(self.iterators)

    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every tensor-parallel rank


def patched_run(args: argparse.Namespace, family: ModelFamily) -> ScriptRun:
    """The run under a patched checkout's own script; raises ConfigError."""
    config = from_megatron.run_config(args, family)
    start.start_together(partial(check_for_all, config), timeout_s=config.sources.timeout_s)
    settle_evaluations(config)
    return ScriptRun(Checkout(config))
