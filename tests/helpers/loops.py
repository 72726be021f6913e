"""A loop as reinforcement-learning trainers on megatron-core have one: what verl 0.9.1's Megatron engine does.

Each replica has samples of its own and cuts them into rows; its step function takes rows from its own iterator. Losses
are divided by the tokens of all replicas and multiplied by the number of micro-batches; outputs go back to their places
by indices.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from megatron_dynapipe.core.units import ModelFamily, round_up
from megatron_dynapipe.costing import CPU_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.tools.certify.parameters import parts_of
from megatron_dynapipe.tools.certify.records import Part
from megatron_dynapipe.tools.loop import Plans
from tests.helpers.layouts.layout import HEADS, HIDDEN, VOCABULARY, Layout
from tests.helpers.layouts.model import build, start

LENGTHS = ((30, 3, 17, 58, 9, 41, 5, 12), (6, 4, 11, 3, 8, 5, 14, 7))
"""Tokens of the samples of each replica, so different that plans have different numbers of micro-batches."""
MULTIPLE = 2
"""Of positions, to which every sample is padded in its row."""
BETA = 0.1
Row = dict[str, Any]


def costs() -> AnalyticCostModel:
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=HIDDEN, heads=HEADS, kv_channels=8, ffn=4 * HIDDEN, vocabulary=VOCABULARY
    )
    return AnalyticCostModel(shape, CPU_RATES, max_size=64, max_length=256)


def wire_rows(lengths: Sequence[int]) -> int:
    return sum(round_up(length, MULTIPLE) for length in lengths)


def shared_rows(lengths: Sequence[int]) -> int:
    """Of two tensor-parallel ranks that share a sequence."""
    return wire_rows(lengths) // 2


class Loop:
    """One rank: a policy that trains, and a reference without gradients in the same process.

    Args:
        layout: of both.
        per_token: losses are sums, given with their numbers of tokens.
    """

    def __init__(self, layout: Layout, *, per_token: bool = False) -> None:
        self.layout = layout
        self.per_token = per_token
        self.start()
        self.reference, policy = self.build(), self.build()
        for chunk in (*self.reference, *policy):
            chunk.config.calculate_per_token_loss = per_token
            chunk.config.variable_seq_lengths = True
        for parameter in (parameter for chunk in self.reference for parameter in chunk.parameters()):
            parameter.data *= 0.9
            parameter.requires_grad_(False)
        config = policy[0].config
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=layout.overlap)
        self.policy = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(policy)
        ]
        if layout.overlap:
            config.no_sync_func = [chunk.no_sync for chunk in self.policy]
            config.no_sync_func = config.no_sync_func if len(self.policy) > 1 else config.no_sync_func[0]
        self.replica = parallel_state.get_data_parallel_rank()
        self.place = self.replica, parallel_state.get_tensor_model_parallel_rank()
        self.lengths = list(LENGTHS[self.replica])
        draw = np.random.default_rng(self.replica)
        self.samples = [torch.from_numpy(draw.integers(3, VOCABULARY, n + 1)) for n in self.lengths]
        self.advantages = torch.from_numpy(draw.normal(size=len(self.lengths))).float()
        self.tokens = sum(map(sum, LENGTHS[: layout.replicas]))
        self.calls: list[tuple[int, tuple[int, ...]]] = []

    def start(self) -> None:
        start(self.layout, None)

    def build(self) -> list[torch.nn.Module]:
        """This rank's chunks of a model."""
        return build(self.layout, None)

    def rows(self, indices: Sequence[Sequence[int]], **data: list[torch.Tensor]) -> list[Row]:
        """Rows of the samples at these places, one after another; `data` has a tensor for each sample."""
        return [self._row(tuple(each), len(indices), data) for each in indices]

    def _row(self, indices: tuple[int, ...], count: int, data: dict[str, list[torch.Tensor]]) -> Row:
        lengths = [self.lengths[index] for index in indices]
        starts = np.cumsum([0, *(round_up(length, MULTIPLE) for length in lengths)])
        positions = int(starts[-1])
        tokens, labels, places = (torch.zeros(1, positions, dtype=torch.int64) for _ in range(3))
        masked = torch.ones(positions, positions, dtype=torch.bool)
        for index, first, end in zip(indices, starts, starts[1:], strict=False):
            sample, part = self.samples[index], slice(first, first + self.lengths[index])
            tokens[0, part], labels[0, part] = sample[:-1], sample[1:]
            places[0, first:end] = torch.arange(end - first)
            masked[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        return {
            "tokens": tokens,
            "labels": labels,
            "positions": places,
            "mask": masked[None, None],
            "parts": [slice(first, first + n) for first, n in zip(starts[:-1], lengths, strict=True)],
            "indices": indices,
            "num_micro_batch": count,
            "data": {name: [values[index] for index in indices] for name, values in data.items()},
        }

    def step(self, rows: Iterator[Row], model: torch.nn.Module, *, update: bool) -> tuple[Any, Callable[..., Any]]:
        """The trainer's step function, which sees batches of its own and counts its calls."""
        row = next(rows)
        inner = unwrap_model(model)
        self.calls.append((inner.vp_stage or 0, row["indices"]))
        output = model(row["tokens"], row["positions"], row["mask"])
        if inner.post_process:
            labels = row["labels"] % output.size(-1)  # of each tensor-parallel rank's part of the vocabulary
            log_probs = output.float().log_softmax(-1).gather(-1, labels[..., None])[0, :, 0]
            output = {"log_probs": [log_probs[part] for part in row["parts"]]}
        return output, partial(self.loss, row=row, update=update)

    def loss(self, output: dict[str, Any], *, row: Row, update: bool, non_loss_data: bool = False) -> Any:
        """The loss of a micro-batch as Megatron's schedule takes it, and its report."""
        log_probs = output["log_probs"]
        if non_loss_data:
            return [one.detach() for one in log_probs]
        report = {"model_output": [one.detach() for one in log_probs], "loss": 0.0}
        if not update:
            return torch.tensor(1.0), report
        loss = sum(
            (BETA * (own - ref) - self.advantages[index] * (own - old).exp()).sum()
            for own, old, ref, index in zip(
                log_probs, row["data"]["old"], row["data"]["reference"], row["indices"], strict=True
            )
        )
        if self.per_token:
            report["loss"] = loss.item()
            return loss, torch.tensor(sum(map(len, log_probs)), dtype=torch.int), report
        loss = loss / self.tokens * self.layout.replicas
        report["loss"] = loss.item()
        return loss * row["num_micro_batch"], report

    def run(
        self,
        run: Callable[..., list[Any]],
        model: list[torch.nn.Module],
        indices: Sequence[Sequence[int]],
        *,
        update: bool = False,
        **data: list[torch.Tensor],
    ) -> dict[str, Any]:
        """One call of a schedule function; outputs by sample, on the last stage, and the sum of losses."""
        self.calls.clear()
        rows = self.rows(indices, **data)
        chunks = len(model)
        reports = run(
            forward_step_func=partial(self.step, update=update),
            data_iterator=[iter(rows) for _ in model] if chunks > 1 else iter(rows),
            model=model if chunks > 1 else model[0],
            num_microbatches=len(rows),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not update,
        )
        by_place: dict[int, torch.Tensor] = {}
        for each, report in zip(indices, reports, strict=bool(reports)):
            by_place |= dict(zip(each, report["model_output"], strict=True))
        return {
            "outputs": [by_place[place] for place in sorted(by_place)],
            "loss": sum(report["loss"] for report in reports),
            "gradients": self.gradients() if update else None,
            "calls": list(self.calls),
        }

    def gradients(self) -> list[Part]:
        return parts_of([model.module for model in self.policy], lambda parameter: parameter.main_grad.clone())

    def iteration(self, of_policy: "Passes", of_reference: "Passes") -> dict[str, Any]:
        """Log-probabilities of both models, then an update; each replica needs all stages' outputs of its samples."""
        with torch.no_grad():
            old = of_policy(self.policy)
            reference = of_reference(self.reference)
        data = {"old": self._on_all_stages(old), "reference": self._on_all_stages(reference)}
        for model in self.policy:
            model.zero_grad_buffer()
        update = of_policy(self.policy, update=True, **data)
        return {
            "old": old["outputs"],
            "reference": reference["outputs"],
            "reference_everywhere": data["reference"],
            "place": self.place,
            **update,
        }

    def _on_all_stages(self, result: dict[str, Any]) -> list[torch.Tensor]:
        """The last stage's outputs, on every rank of the pipeline."""
        group = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        outputs = result["outputs"] or [torch.zeros(length) for length in self.lengths]
        for output in outputs:
            dist.broadcast(output, last, group=group)
        return outputs


Passes = Callable[..., dict[str, Any]]


def by_megatron(loop: Loop) -> Passes:
    """Megatron's own schedule, every sample a micro-batch."""
    alone = [[place] for place in range(len(loop.samples))]
    return lambda model, **how: loop.run(get_forward_backward_func(), model, alone, **how)


def by_plans(loop: Loop, plans: Plans, seen: list[list[list[int]]]) -> Passes:
    """As planned; `seen` gets the micro-batches."""

    def passes(model: list[torch.nn.Module], *, update: bool = False, **data: Any) -> dict[str, Any]:
        seen.append(plans.micro_batches(loop.lengths, forward_only=not update))
        return loop.run(plans.forward_backward, model, seen[-1], update=update, **data)

    return passes
