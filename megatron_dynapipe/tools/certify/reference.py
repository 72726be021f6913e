"""The reference: one process that takes samples one at a time, unpadded, by plain autograd; no pipeline, no plan.

Megatron's own loop, optimizer and schedule of learning rates stand around it, as around a planned run.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, override

import numpy as np
import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.data.segments import causal_mask
from megatron_dynapipe.data.spans import LossOn, kept_pair, sequence
from megatron_dynapipe.megatron.entry.script import ScriptRun
from megatron_dynapipe.megatron.equip.attention import has_engine_attention
from megatron_dynapipe.megatron.equip.experts import finish_iteration, forget_iteration, routers_of
from megatron_dynapipe.megatron.execution.step_functions import masked_loss, takes_mask
from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs, padded_attention
from megatron_dynapipe.megatron.supply.long_samples import long_samples
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.tools.certify.parameters import entries, gradients_of
from megatron_dynapipe.tools.certify.records import GRADIENTS, REVERSED, SAMPLES, RankRecord
from megatron_dynapipe.tools.conversion import checkpoint

Sample = tuple[int, list[int], list[int], list[float], list[int] | None]
"""Number, tokens that go in, labels, which of these count, and an encoder's input."""


def position_losses(model: nn.Module, tokens: Tensor, labels: Tensor, inputs: Tensor | None = None) -> Tensor:
    """The loss of every position of one sample, [1, positions], from a whole model.

    Args:
        model: a `GPTModel` or a `T5Stage`, wrapped or not.
        tokens: int64[1, positions]: a sequence without its last token, or a decoder's input.
        labels: int64[1, positions].
        inputs: int64[1, s], an encoder's.
    """
    (inner,) = unwrap_model([model])
    inner.set_input_tensor([None])
    length = tokens.size(1)
    device = tokens.device
    if inputs is None:
        mask = causal_mask(length, device) if takes_mask([model]) else None
        losses: Tensor = model(tokens, torch.arange(length, device=device)[None], mask, labels=labels)
        return losses
    shape = Shape(1, inputs.size(1), length)
    s = torch.tensor([inputs.size(1)], dtype=torch.int32, device=device)
    t = torch.tensor([length], dtype=torch.int32, device=device)
    attention = padded_attention(shape, s, t, engine=has_engine_attention([model]))
    losses = model(T5StageInputs(tokens=inputs, decoder_tokens=tokens, labels=labels, **attention))
    return losses


class ReferenceRun(ScriptRun):
    """A run of one process that takes the samples of each iteration one by one.

    It writes its first weights as a checkpoint, for the planned run to begin from, unless it has begun from one.
    """

    record: RankRecord
    folder: Path
    samples = 0

    @override
    def datasets(self, _samples: object, vp_stage: int | None = None) -> tuple[object, object, object]:
        """Numbers of iterations; samples are read where they are used."""
        config = self.host.config
        split = config.inputs.splits[0]
        self.record.notes = [*long_samples(split_sampler(config.data, split), config.data, split)]
        if config.args.pretrained_checkpoint is None:
            (self.folder / "weights").mkdir()
            checkpoint.save(self._modules[0], self.folder / "weights")
        return iter(range(1_000_000)), None, None

    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every tensor-parallel rank

    @override
    def forward_backward(self, *, model: Any, data_iterator: Any, **_: object) -> list[dict[str, Tensor]]:
        """One iteration, in place of Megatron's schedule; gradients are finished as Megatron finishes them."""
        models = model if isinstance(model, list) else [model]
        parts = self.record.parts
        models[0].train(not self.host.config.shape.dropout)
        batch = self._samples_of(next(data_iterator))
        self.samples = len(batch)
        is_first = not parts
        half = self.host.weights_dtype is not torch.float32
        if is_first and half:  # noise: what the order of samples makes
            self._run_all(models, batch[::-1])
            parts[REVERSED] = gradients_of(models)
            models[0].zero_grad_buffer()
            forget_iteration(models)
        report = self._run_all(models, batch, keeps=is_first)
        if is_first:
            parts[GRADIENTS] = gradients_of(models)
        return [report]

    def _samples_of(self, iteration: int) -> list[Sample]:
        run = self.host.config
        split = run.inputs.splits[0]
        meta = read_meta(run.data)
        reader = open_split(run.data, split.name, run.family)
        loss_on = run.sources.loss_on or LossOn(meta.loss)
        sampler = split_sampler(run.data, split)
        batch = sampler.batch(iteration)
        samples: list[Sample] = []
        for number, s, t in zip(batch.sample_ids.tolist(), batch.input_lengths, batch.target_lengths, strict=True):
            inputs, targets = (part.astype(np.int64) for part in reader[number])
            if run.family.is_encoder_decoder:
                words, target = kept_pair(sampler.cutter, number, (inputs, targets), (int(s), int(t)))
                labels = [*target.tolist(), meta.eos_id]
                given = [meta.bos_id, *target.tolist()]
                samples.append((number, given, labels, [1.0] * len(labels), words.tolist()))
            else:
                words, counts = sequence(sampler.cutter, number, (inputs, targets), int(s), loss_on)
                read = words[:-1].tolist()
                labels = words[1:].tolist()
                samples.append((number, read, labels, counts[1:].tolist(), None))
        return [sample for sample in samples if sample[1]]

    def _run_all(self, models: list[Any], samples: Sequence[Sample], *, keeps: bool = False) -> dict[str, Tensor]:
        """Forward and backward of every sample, and Megatron's finalisation; the report of the whole iteration."""
        (model,) = models
        config = get_model_config(model)
        reports: list[dict[str, Tensor]] = []
        vectors = vectors_of(model) if keeps else []
        before = [torch.zeros_like(vector.main_grad) for vector in vectors]
        tokens = torch.zeros([], dtype=torch.int, device=self.host.device)
        for number, *values, encoded in samples:
            words, labels, counts = map(self._row, values)
            inputs = None if encoded is None else self._row(encoded)
            for router in routers_of(models):
                router.begin(torch.zeros_like(words[0]), 1)
            with torch.autocast(self.host.device.type, config.autocast_dtype, enabled=config.enable_autocast):
                losses = position_losses(model, words, labels, inputs)
            loss, count = forward_step_calc_loss(
                model, losses, partial(masked_loss, counts), config, vp_stage=None, collect_non_loss_data=False,
                num_microbatches=1, forward_data_store=reports, cp_group_size=1, is_last_stage=True,
            )  # fmt: skip
            if config.grad_scale_func is None:
                loss.backward()
            else:
                config.grad_scale_func(loss).backward()
            tokens += count
            if keeps:
                total, counted = self.record.samples.get(number, (0.0, 0.0))
                self.record.samples[number] = total + float(loss.detach()), counted + float(count)
                after = [vector.main_grad.clone() for vector in vectors]
                added = [new - old for new, old in zip(after, before, strict=True)]
                row = torch.cat(added).float().cpu()
                rows = self.record.parts.setdefault(SAMPLES, [])
                rows.append(("", [number], [len(row)], row))
                before = after
        groups = ProcessGroupCollection.use_mpu_process_groups()
        config.finalize_model_grads_func(models, tokens, pg_collection=groups, force_all_reduce=False)
        finish_iteration(models, groups)
        return {name: torch.stack([report[name] for report in reports]).sum(0) for name in reports[0]}

    def _row(self, values: object) -> Tensor:
        """Numbers of a sample's positions as a batch of one, [1, positions], on the device."""
        return torch.tensor(values, device=self.host.device)[None]


def vectors_of(model: nn.Module) -> list[Any]:
    """The norms' weights, in the order of their names."""
    (inner,) = unwrap_model([model])
    by_place = {parameter.data_ptr(): parameter for parameter in inner.parameters()}
    found = {entry.key: by_place[entry.data.data_ptr()] for entry in entries(inner) if "norm" in entry.key}
    return [found[name] for name in sorted(found)]
