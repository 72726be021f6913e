"""The run under test: planned training whose first iteration is run several times over, from the same weights.

as planned, twice                                            determinism
as planned, nothing computed again                           recomputation
as planned, nothing dropped                                  losses by sample and gradients, as the reference has them
the same, every second sample of a row replaced; the others  isolation: no sample's states move that was left as it is
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, override

import msgspec
import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout, Recompute, target_positions
from megatron_dynapipe.data.collate import HostMicroBatch, sample_numbers
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.entry.script import ScriptRun
from megatron_dynapipe.megatron.equip.experts import forget_iteration
from megatron_dynapipe.megatron.execution.megatron_stage import DeviceBatch
from megatron_dynapipe.megatron.execution.task_losses import BY_TASK
from megatron_dynapipe.tools.certify.parameters import gradients_of
from megatron_dynapipe.tools.certify.parts import errors_by_name
from megatron_dynapipe.tools.certify.records import GRADIENTS, Part, RankRecord
from megatron_dynapipe.ways.chains import cut_entries

States = dict[tuple[int, int], Sequence[Tensor]]
"""Outputs of chunks for micro-batches, by micro-batch and chunk."""


class ProbedRun(ScriptRun):
    """A planned run that records its first iteration."""

    record: RankRecord

    @override
    def forward_backward(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, **keywords: Any
    ) -> list[dict[str, Tensor]]:
        """One planned iteration; the first is run before by itself, as often as it is looked at."""
        models = model if isinstance(model, list) else [model]
        if not self.record.parts:
            iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            item: PlannedIteration = next(iterator)
            self._record_first(_Probe(self, models, forward_step_func, item))
            data_iterator = iter((item,))
        for chunk in models:
            chunk.train(not self.host.config.shape.dropout)
        return super().forward_backward(
            forward_step_func=forward_step_func, data_iterator=data_iterator, model=model, **keywords
        )

    def _record_first(self, probe: "_Probe") -> None:
        record = self.record
        plan = probe.item.entry.micro_batches
        record.places = probe.places
        gradients, _ = probe.run(plan)
        record.repeated = _most(gradients, probe.run(plan)[0])
        bare = [msgspec.structs.replace(mb, recompute=(Recompute.NONE,) * len(mb.recompute)) for mb in plan]
        record.recomputed = _most(gradients, probe.run(bare)[0])
        for model in probe.models:
            model.train(not self.host.config.shape.dropout)
        record.parts[GRADIENTS], states = probe.run(plan, record)
        for parity in (0, 1):
            probe.compare(states, probe.run(plan, parity=parity)[1], parity, record)

    def run_once(self, item: PlannedIteration, host: Callable[[int], HostMicroBatch], models: Any, step: Any) -> Any:
        """Run an iteration with whole gradients on every replica; the last stage's reports."""
        runner = self._runner
        assert runner is not None, "Megatron has asked for its datasets"
        make_batch = runner.make_batch
        runner.make_batch = lambda host, device: {**make_batch(host, device), "micro_batch": host.index}
        try:
            step = self.host.wrapped(step)
            return runner.run(item.entry, host, models, step, longest=self._longest, force_all_reduce=True)[1]
        finally:
            runner.make_batch = make_batch


class _Probe:
    """Runs of one iteration through this rank's models; none leaves anything behind."""

    def __init__(self, planned: ProbedRun, models: list[Any], step: Any, item: PlannedIteration) -> None:
        self.planned = planned
        self.models = models
        self.item = item
        self._step = step
        self.places: dict[int, str] = {}
        for index, micro_batch in enumerate(item.entry.micro_batches):
            cut = {at for at, _ in cut_entries(micro_batch)}
            for at, sample in enumerate(micro_batch.sample_ids):
                how: str = "in pieces" if at in cut else micro_batch.layout
                how = f"{how}, a share of it" if micro_batch.share[0] > 1 else how
                self.places[sample] = f"micro-batch {index} of replica {item.entry.replica}, {how}"
        self._index = {sample: index for index, sample in enumerate(self.places)}
        self._ids = list(self.places)

    def run(
        self, plan: Sequence[MicroBatch], record: RankRecord | None = None, *, parity: int | None = None
    ) -> tuple[list[Part], States]:
        """Run micro-batches; the gradients, and what this rank's chunks gave.

        Args:
            plan: the micro-batches, in the item's own order.
            record: takes the samples' losses.
            parity: which samples' tokens are replaced.
        """
        states: States = {}

        def step(batches: Iterator[DeviceBatch], model: torch.nn.Module) -> Any:
            batch = next(batches)
            output, loss_function = self._step(iter((batch,)), model)
            outputs = output if isinstance(output, tuple | list) else (output,)
            chunk = next(chunk for chunk, other in enumerate(self.models) if other is model)
            states[batch["micro_batch"], chunk] = [tensor.detach().float().cpu() for tensor in outputs]
            return output, loss_function

        for model in self.models:
            model.zero_grad_buffer()
            model.force_all_reduce = True
        item = replace(self.item, entry=msgspec.structs.replace(self.item.entry, micro_batches=tuple(plan)))
        reports = self.planned.run_once(item, lambda index: self._host(index, parity), self.models, step)
        if record is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
            self._keep(reports, record)
        gradients = gradients_of(self.models)
        for model in self.models:
            model.zero_grad_buffer()
            model.force_all_reduce = False
        forget_iteration(self.models)
        return gradients, states

    def _keep(self, reports: Sequence[Mapping[str, Tensor]], record: RankRecord) -> None:
        for report in reports:
            losses = report.get(BY_TASK, torch.zeros(0)).tolist()
            for sample, (total, tokens) in zip(self._ids, losses, strict=False):
                before_total, before_tokens = record.samples.get(sample, (0.0, 0.0))
                record.samples[sample] = before_total + total, before_tokens + tokens

    def _host(self, index: int, parity: int | None) -> HostMicroBatch:
        """A micro-batch whose tasks are its samples, so that its report has the loss of each."""
        host = self.item.micro_batches[index]
        inputs, targets = self._numbers(index)
        labelled = targets if len(targets) else inputs
        changes: dict[str, Any] = {}
        if host.labels is not None:
            rows = labelled.T if host.rows is None else labelled.reshape(1, -1)[:, host.rows]
            changes["tasks"] = torch.from_numpy(np.ascontiguousarray(rows))
        if parity is not None:
            vocabulary = read_meta(self.planned.host.config.data).vocabulary_size
            for name, numbers in (("tokens", inputs), ("decoder_tokens", targets)):
                tokens = getattr(host, name)
                if tokens is None:
                    continue
                is_of_parity = (numbers % 2 == parity) & (numbers < len(self._ids))
                other = (tokens + 1 + vocabulary // 2) % vocabulary
                changes[name] = torch.where(torch.from_numpy(is_of_parity).T, other, tokens)
        return replace(host, **changes)

    def _numbers(self, index: int) -> list[Any]:
        """The sample of every position of the input and of the target, int64[s, b], as its place among the replica's.

        Positions without one have a number that is above all samples'.
        """
        planned = self.item.entry.micro_batches[index]
        family = self.item.entry.family
        size, *positions = planned.shape
        extra = 0 if planned.layout is BatchLayout.PACKED else -1  # a packed row has room for one more
        targets = [target_positions(family, tokens) + extra for tokens in planned.target_lengths]
        index_of = np.array([*(self._index[sample] for sample in planned.sample_ids), len(self._ids)])
        numbers: list[Any] = []
        for lengths, length in zip((planned.positions(family), targets), positions, strict=True):
            numbers.append(index_of[sample_numbers(lengths, size, length)] if length else [])
        return numbers

    def compare(self, before: States, after: States, parity: int, record: RankRecord) -> None:
        """Note the sample that moved furthest at the end of each virtual stage, of those that were left as they are."""
        entry = self.item.entry
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        last = entry.pipeline_stages * entry.chunks - 1
        for (index, chunk), states in before.items():
            stage = entry.stage_plan.stage + chunk * entry.pipeline_stages
            numbers: Sequence[Any] = self._numbers(index)
            if stage == last:
                tasks = self._host(index, None).tasks
                assert tasks is not None, "the last stage has labels"
                numbers = [tasks.numpy()]
            for of_positions, old, new in zip(numbers, states, after[index, chunk], strict=False):
                places = torch.from_numpy(np.ascontiguousarray(of_positions))
                if stage != last and len(old) < len(places):  # sequence parallel
                    places = places.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
                distance = (new - old).abs().view(*places.shape, -1).amax(-1)
                moved = distance / old.abs().max().clamp_min(1e-30)
                moved = torch.where((places < len(self._ids)) & (places % 2 != parity), moved, -1.0)
                furthest = float(moved.max())
                if furthest > record.moved.get(stage, (-1.0, ""))[0]:
                    sample = self._ids[int(places.flatten()[int(moved.argmax())])]
                    record.moved[stage] = furthest, f"sample {sample}, {self.places[sample]}"


def _most(some: Sequence[Part], others: Sequence[Part]) -> tuple[float, str]:
    """The largest relative difference of any parameter's gradient, and which parameter's."""
    before = {f"{name} {offset}": values for name, offset, _, values in some}
    after = {f"{name} {offset}": values for name, offset, _, values in others}
    errors = errors_by_name(after, before)
    if not errors:
        return 0.0, ""
    furthest = max(errors, key=errors.__getitem__)
    return errors[furthest], furthest.partition(" ")[0]
