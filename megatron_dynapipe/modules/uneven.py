"""Training over stages with different numbers of replicas, as `orchestrate` plans them.

    unit of 6 samples   stage 0 on ranks 0, 1     stage 1 on rank 2
                        [0 1 2] [3 4 5]     ──►   [0 1 2 3 4 5]        activations, along the batch
                        [0 1 2] [3 4 5]     ◄──   [0 1 2 3 4 5]        their gradients

Every unit is split over a stage's replicas in equal slices, in order, the first ones having one sample more where they
do not divide. At a boundary every rank sends to each rank of the next stage the rows that both hold. Passes run in
1F1B; sends do not hold up their rank. After the last pass each stage sums its gradients over its replicas.

A stage takes one tensor, whose first dimension is the batch's, and returns one. Messages go over gloo, from the host's
memory: for models that need no such stages, `Pipeline` sends from the device.
"""

import datetime
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.errors import ConfigError, DataError

LossFunction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | float]]
"""`loss_fn(output, target) → (sum, count)` of a slice."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 8


def slices(rows: int, replicas: int) -> list[range]:
    """The rows of every replica, in order: equal, the first ones having one more where they do not divide."""
    ends = [0, *itertools.accumulate(rows // replicas + (at < rows % replicas) for at in range(replicas))]
    return [range(first, end) for first, end in itertools.pairwise(ends)]


def shared_rows(mine: range, theirs: Sequence[range]) -> list[tuple[int, slice]]:
    """(which of theirs, the rows that it shares with mine, counted from my first) wherever there are any."""
    found = []
    for at, other in enumerate(theirs):
        first, end = max(mine.start, other.start), min(mine.stop, other.stop)
        if first < end:
            found.append((at, slice(first - mine.start, end - mine.start)))
    return found


class UnevenPipeline:
    """One rank's part in training steps. Every rank makes it at the same point: it makes process groups.

    Args:
        module: this rank's stage, the same on all its replicas.
        stages: ranks of every stage, in order; every rank of the job is in one stage.
        optimizer: over the module's parameters; None leaves the gradients where they are.
        loss_fn: called on the last stage's ranks with their slice of each unit.
        units: in which each batch goes through the pipeline, one after another.
        timeout_s: deadline of every transfer.

    Raises:
        ConfigError: the stages are not a division of the job's ranks, or there are no units.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[int]],
        optimizer: torch.optim.Optimizer | None,
        loss_fn: LossFunction,
        *,
        units: int,
        timeout_s: float = 300.0,
    ) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if sorted(itertools.chain(*stages)) != list(range(world)) or not all(stages):
            raise ConfigError(
                f"expected stages that have each of {world} ranks once, got {[list(ranks) for ranks in stages]}",
                hint="a plan that leaves devices unused is run on fewer ranks",
            )
        if units < 1:
            raise ConfigError(f"expected at least one unit, got {units}")
        self.module, self._optimizer, self._loss_fn, self._units = module, optimizer, loss_fn, units
        self._stages = [list(ranks) for ranks in stages]
        self.stage = next(at for at, ranks in enumerate(self._stages) if rank in ranks)
        self.replica = self._stages[self.stage].index(rank)
        timeout = datetime.timedelta(seconds=timeout_s)
        self._all = dist.new_group(backend="gloo", timeout=timeout)
        groups = [dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in self._stages]
        self._mine = groups[self.stage]
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []
        self._start_equal()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train one batch; the loss, sum over everything / count over everything, on every rank.

        Args:
            inputs: the whole batch, the same on every rank of the first stage; others look at its first dimension.
            targets: of as many samples, read by the last stage.

        Raises:
            DataError: fewer samples than units, or than a stage's replicas in a unit.
        """
        rows = [part.shape[0] for part in inputs.tensor_split(self._units)]
        most = max(map(len, self._stages))
        if len(targets) != len(inputs) or min(rows) < most:
            raise DataError(
                f"expected as many targets as inputs, at least {self._units * most} for {self._units} units over"
                f" {most} replicas, got {len(inputs)} inputs and {len(targets)} targets"
            )
        self.module.zero_grad(set_to_none=True)
        totals = torch.zeros(2, dtype=torch.float64)
        held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        ends = [0, *itertools.accumulate(rows)]
        for backward, unit in self._passes():
            if backward:
                self._backward(rows[unit], *held.pop(unit))
            else:
                here = slice(ends[unit], ends[unit + 1])
                held[unit] = self._forward(inputs[here], targets[here], totals)
        self._finish_sends()
        dist.all_reduce(totals, group=self._all)
        self._reduce(float(totals[1]))
        if self._optimizer is not None:
            self._optimizer.step()
        return float(totals[0] / totals[1])

    def _passes(self) -> list[tuple[bool, int]]:
        """(whether backward, unit) in the order of 1F1B."""
        ahead = min(self._units, len(self._stages) - self.stage)
        forwards, backwards = ([(way, unit) for unit in range(self._units)] for way in (False, True))
        paired = itertools.chain(*zip(backwards, forwards[ahead:], strict=False))
        return [*forwards[:ahead], *paired, *backwards[self._units - ahead :]]

    def _forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, totals: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What the stage received, to take its gradient from, and what it made: on the last stage the loss."""
        rows = len(inputs)
        mine = slices(rows, len(self._stages[self.stage]))[self.replica]
        device = next((parameter.device for parameter in self.module.parameters()), inputs.device)
        received = None
        if self.stage == 0:
            given = inputs[mine.start : mine.stop].to(device)
        else:
            received = self._receive(rows, self.stage - 1).to(device).requires_grad_()
            given = received
        output = self.module(given)
        if self.stage < len(self._stages) - 1:
            self._send(output.detach(), rows, self.stage + 1)
            return received, output
        loss, count = self._loss_fn(output, targets[mine.start : mine.stop].to(device))
        totals += torch.tensor([float(loss.detach()), float(count)], dtype=torch.float64)
        return received, loss

    def _backward(self, rows: int, received: torch.Tensor | None, output: torch.Tensor) -> None:
        gradient = None
        if self.stage < len(self._stages) - 1:
            gradient = self._receive(rows, self.stage + 1).to(output.device)
        torch.autograd.backward(output, gradient)
        if received is not None:
            assert received.grad is not None
            self._send(received.grad, rows, self.stage - 1)

    def _send(self, tensor: torch.Tensor, rows: int, to: int) -> None:
        """Start sending its slice to the ranks of another stage that hold the same rows."""
        ranks = self._stages[to]
        mine = slices(rows, len(self._stages[self.stage]))[self.replica]
        for at, part in shared_rows(mine, slices(rows, len(ranks))):
            piece = tensor[part].cpu().contiguous()
            for message in (_header(piece), piece):
                work = dist.isend(message, ranks[at], group=self._all)
                assert work is not None
                self._sends.append((work, message))

    def _receive(self, rows: int, source: int) -> torch.Tensor:
        """Its slice, from the ranks of another stage that hold its rows."""
        ranks = self._stages[source]
        mine = slices(rows, len(self._stages[self.stage]))[self.replica]
        pieces = []
        for at, part in shared_rows(mine, slices(rows, len(ranks))):
            header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64)
            dist.recv(header, ranks[at], group=self._all)
            piece = _empty(header)
            if len(piece) != part.stop - part.start:
                raise DataError(f"expected {part.stop - part.start} samples of rank {ranks[at]}, got {len(piece)}")
            dist.recv(piece, ranks[at], group=self._all)
            pieces.append(piece)
        return torch.cat(pieces)

    def _finish_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    @torch.no_grad()
    def _reduce(self, count: float) -> None:
        """Gradients of sum over everything / count over everything, the same on every replica."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = gradient.cpu()
                dist.all_reduce(total, group=self._mine)
                parameter.grad = (total / count).to(parameter.device)

    @torch.no_grad()
    def _start_equal(self) -> None:
        """All replicas take the first one's weights."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            whole = tensor.detach().cpu()
            dist.broadcast(whole, self._stages[self.stage][0], group=self._mine)
            tensor.copy_(whole)


def stage_of_plan(layers: Sequence[nn.Module], plan_stages: Sequence[tuple[int, int]], stage: int) -> nn.Sequential:
    """A stage's layers of a model that is a chain of modules.

    Args:
        layers: of the whole model, one for each layer of the profile.
        plan_stages: (first layer, end) of every stage.
        stage: which.

    Raises:
        ConfigError: the plan is of another number of layers.
    """
    if plan_stages[-1][1] != len(layers):
        raise ConfigError(f"expected a plan of {len(layers)} layers, got one of {plan_stages[-1][1]}")
    first, end = plan_stages[stage]
    return nn.Sequential(*layers[first:end])


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """Type and shape: int64[10]."""
    if tensor.dtype not in _DTYPES or not 1 <= tensor.dim() <= _MOST_DIMENSIONS:
        raise DataError(
            f"expected a stage to return a floating tensor of 1 to {_MOST_DIMENSIONS} dimensions, got"
            f" {tensor.dtype} of {tensor.dim()}"
        )
    words = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor([*words, *[0] * (_MOST_DIMENSIONS + 2 - len(words))])


def _empty(header: torch.Tensor) -> torch.Tensor:
    kind, dimensions, *sizes = header.tolist()
    return torch.empty(sizes[:dimensions], dtype=_DTYPES[kind])
