"""Cutting long samples along their sequence into pieces that a pipeline runs one after another.

    sample of 20 positions, later pieces attend to more    |-- 0:8 --|- 8:15 -|- 15:20 -|    equal time, not length

A piece is planned like a sample of its own positions that costs a little more (`costing.pieces`); it goes into a packed
row, each piece of a sample into another, and the search keeps their order (`csrc/search/chains.h`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from megatron_dynapipe.core.batch import Samples, round_up_all
from megatron_dynapipe.core.costs import ABSENT, ATTENTION, EXPERT_MLP, HEAD, LARGEST_COST, MLP, CostTables, Quantity
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.partition import OrderedPartitions, by_length
from megatron_dynapipe.core.problem import BatchProblem, IntArray
from megatron_dynapipe.core.search import notice
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, Recompute, in_mb
from megatron_dynapipe.core.ways import Candidate
from megatron_dynapipe.costing.pieces import piece_costs, prefix_costs

MOST_PIECES = 2048
"""The most pieces of a batch with a size that was asked for, unless it has more than half as many samples: they take
about 2 s to plan, and eight times as many a minute."""
_LONG = 0.15
"""A share of the mean stage's work: a sample with less of it is never cut."""
_SHARES = (0.75, 0.5, 1 / 3, 0.25)
"""Shares of the longest sample that pieces have at most."""
_FINER, _LEAST_FINER = (1 / 6, 1 / 8, 1 / 12), 0.25
"""Smaller ones, and the share of the mean stage's work that they have to have."""
_PARTS = (2, 3, 4, 6, 8, 9, 10, 12, 16, 24, 32, 48, 64)
"""Parts to cut the longest sample into, if whole samples do not fit: near the least memory not every size does."""
_LEAST_PIECE = 128
_NEARLY = 0.9
"""Of a stage's memory: a sample whose pieces take more is refused for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The cuts of a batch's samples: int64[pieces and whole samples] each, in the order of the batch.

    Attributes:
        sample: which of the batch's samples each is of.
        start, end: positions of it.
        length: positions of that sample.
    """

    sample: IntArray
    start: IntArray
    end: IntArray
    length: IntArray

    @property
    def is_piece(self) -> IntArray:
        """1 for a piece, 0 for a whole sample."""
        return (self.end - self.start < self.length).astype(np.int64)

    @property
    def later(self) -> IntArray:
        """How many later pieces of the sample there are."""
        return np.searchsorted(self.sample, self.sample, side="right") - 1 - np.arange(len(self.sample))

    @property
    def chains(self) -> IntArray:
        """The number of the cut sample that each is a piece of, -1 for whole ones: int64[…]."""
        cut = np.unique(self.sample[self.is_piece == 1])
        return np.where(self.is_piece == 1, np.searchsorted(cut, self.sample), -1)


def cut(lengths: IntArray, most: int, multiple: int, tables: CostTables, *, strict: bool = False) -> Pieces:
    """Samples longer than `most` positions in as few pieces of equal time as have at most about as many.

    Args:
        lengths: int64[samples], positions.
        most: positions of a piece.
        multiple: pieces but the last are multiples of it.
        tables: one layer's costs, for the time that attending to earlier pieces takes.
        strict: no piece has more, where equal times would need it in equal pieces; or `multiple` where that is more.
    """
    rows: list[tuple[int, int, int, int]] = []
    balance = _linear_share(tables)
    for sample, length in enumerate(lengths.tolist()):
        ends = {0, *_inner_ends(length, -(-length // most), multiple, balance), length}
        if strict and max(end - start for start, end in pairwise(sorted(ends))) > most:
            ends = {*range(0, length, max(most // multiple, 1) * multiple), length}
        rows += [(sample, start, end, length) for start, end in pairwise(sorted(ends))]
    sample_of, start, end, whole = np.array(rows, np.int64).T
    return Pieces(sample=sample_of, start=start, end=end, length=whole)


def _inner_ends(length: int, parts: int, multiple: int, balance: float) -> list[int]:
    """The places to cut a sample so that balance · x + x² grows by equal steps, rounded to the multiple."""
    total = balance * length + length**2
    exact = [((balance**2 + 4 * total * part / parts) ** 0.5 - balance) / 2 for part in range(1, parts)]
    return [cut for end in exact if 0 < (cut := round(end / multiple) * multiple) < length]


def _linear_share(tables: CostTables) -> float:
    """v / g of a layer's time T(l) = u + v l + g l²; large where attention counts for little."""
    g = sum(pair / unit / 2 for _, _, pair, unit in prefix_costs(tables)[:2])
    values = tables.values if tables.separate is None else tables.separate
    modules = [tables.kinds.index(ATTENTION), tables.kinds.index(EXPERT_MLP if EXPERT_MLP in tables.kinds else MLP)]
    times = values[modules][:, [Quantity.FORWARD, Quantity.BACKWARD], 0, :, 0].reshape(4, -1)  # of most layers
    feasible = np.flatnonzero((times != ABSENT).all(axis=0))
    if not len(feasible) or g <= 0:
        return 1e12
    longest = int(tables.inputs[feasible[-1]])
    return max(float(times[:, feasible[-1]].sum()) / longest / g - longest, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class CutCandidate(Candidate):
    """A batch with pieces in place of its long samples, which a search starts with in packed rows alone.

    Attributes:
        pieces: where the batch's samples are cut; ids and tokens of `samples` are the whole ones'.
    """

    pieces: Pieces

    def unfit(self) -> InfeasibleError | None:
        """Of a sample whose pieces nearly fill a stage, or more: it keeps all of them while the last one runs."""
        problem, numbers = self.problem, np.flatnonzero(self.pieces.is_piece)
        stages, chains = problem.layout.stages, self.pieces.chains[numbers]
        one = [numbers[at : at + 1] for at in range(len(numbers))]
        least = np.full((2, len(one), problem.layout.virtual_stages), LARGEST_COST)  # kept, and above it at the peak
        for mode in range(len(problem.modes)):
            modes = np.full(len(one), mode, np.int64)
            costs, covered = problem.costs_of(one, [BatchLayout.PACKED] * len(one), modes)
            needed = np.stack([costs.stored_bytes, costs.peak_bytes - costs.stored_bytes])
            least = np.where(covered[:, None], np.minimum(least, needed), least)
        last = np.searchsorted(chains, np.arange(chains.max() + 1), side="right") - 1
        held = least[1, last, -stages:].copy()
        np.add.at(held, chains, least[0].reshape(len(one), -1, stages).sum(axis=1))
        left = problem.memory_limit_bytes - problem.model_state_bytes
        chain, stage = (int(at) for at in np.unravel_index((held - left).argmax(), held.shape))
        if held[chain, stage] <= _NEARLY * left[stage] or (least == LARGEST_COST).any():
            return None
        its = numbers[chains == chain]
        takes, available = in_mb(int(held[chain, stage]), int(left[stage]))
        head = "; the last stage keeps all logits" if stage == stages - 1 else ""
        return InfeasibleError(
            f"sample {self.samples.ids[its[0]]} of {self.pieces.length[its[0]]} positions needs {takes} of {available}"
            f" left after its model state on stage {stage}, which keeps all of its {len(its)} pieces until the last one"
            f" has run, and has messages to hold, too{head}",
            hint="use more tensor parallelism, which divides it, or more pipeline stages; or truncate long samples",
        )


class CutSamples:
    """Long samples in pieces, of a few sizes to choose from or of one.

    Args:
        settings: the planner's.
        is_needed: try smaller ones, since whole samples do not fit.
    """

    def __init__(self, settings: PlannerSettings, *, is_needed: bool = False) -> None:
        self._settings = settings
        self._most = settings.slices if isinstance(settings.slices, int) else None
        self._is_needed = is_needed

    def candidates(self, samples: Samples, problem: BatchProblem) -> Sequence[Candidate]:
        """One for every size of pieces; none where nothing can be cut, or no sample is long for its pipeline."""
        if problem.forward_only or not can_cut(problem):
            return []
        if self._most is not None:
            missed = f"no order of pieces of at most {self._most} positions was found: samples stay whole"
            most = within_bound(samples, self._most)
            if most > self._most:
                notice(
                    f"pieces of at most {self._most} positions would be more than {MOST_PIECES} of a batch, or twice"
                    " its samples: where they would, pieces are longer"
                )
            cut = self._of_size(samples, problem, most)
            return [] if cut is None else [replace(cut, is_default=True, missed=missed)]
        found = dict[bytes, CutCandidate]()
        for most in piece_limits(samples, problem, needed=self._is_needed):
            for mode in range(len(problem.modes)):
                if (cut := self._of_size(samples, problem, most, mode)) is not None:
                    found.setdefault(cut.pieces.end.tobytes(), cut)
        return [*found.values()]

    def _of_size(self, samples: Samples, problem: BatchProblem, most: int, mode: int = 0) -> CutCandidate | None:
        return cut_batch(
            samples,
            problem,
            most,
            self._settings.length_multiple * self._settings.tensor_parallel,
            recompute=self._settings.recompute,
            element_bytes=self._settings.element_bytes,
            strict=self._is_needed or self._most is not None,  # for memory, the longest piece counts
            mode=mode,
        )


def can_cut(problem: BatchProblem) -> bool:
    """Whether costs of pieces are known, as they are for decoder-only models whose keys were counted."""
    known = ((ATTENTION, MLP, HEAD), (ATTENTION, MLP, EXPERT_MLP, HEAD))
    return all(tables.kinds in known and tables.key_value_channels > 0 for tables in problem.modes)


def piece_limits(samples: Samples, problem: BatchProblem, *, needed: bool) -> list[int]:
    """Positions that pieces may have at most, to choose from; none where no sample is long for its pipeline.

    Args:
        samples: the batch's.
        problem: the problem of planning them whole.
        needed: try smaller ones, since whole samples do not fit.
    """
    longest, total = int(samples.input_positions.max()), int(samples.input_positions.sum())
    if needed:
        return [longest // parts for parts in _PARTS if longest // parts >= _LEAST_PIECE]
    of_stage = longest * problem.replicas * problem.layout.stages / total
    if of_stage < _LONG:
        return []
    finer = [share for share in _FINER if share * of_stage >= _LEAST_FINER]
    return [most for share in (*_SHARES, *finer) if (most := int(longest * share)) >= _LEAST_PIECE]


def within_bound(samples: Samples, most: int) -> int:
    """Positions of a piece at most, doubled until a batch has no more than `MOST_PIECES` or twice its samples."""
    lengths, bound = samples.input_positions, max(MOST_PIECES, 2 * len(samples.ids))
    while int((-(-lengths // most)).sum()) > bound:
        most *= 2
    return most


def cut_batch(
    samples: Samples,
    problem: BatchProblem,
    most: int,
    multiple: int,
    *,
    recompute: tuple[Recompute, ...],
    element_bytes: int,
    strict: bool = False,
    mode: int = 0,
) -> CutCandidate | None:
    """The batch with samples of more than `most` positions cut; None where there are none.

    A sample that the batch holds twice stays whole, so that pieces are known by their sample.

    Args:
        samples: the batch's.
        problem: the problem of planning them whole.
        most: as `cut`.
        multiple: as `cut`.
        strict: as `cut`.
        recompute: the problem's modes.
        element_bytes: bytes of an element of keys and values.
        mode: the one under which pieces of a sample take equal time.
    """
    ids, counts = np.unique(samples.ids, return_counts=True)
    once = counts[np.searchsorted(ids, samples.ids)] == 1
    pieces = cut(np.where(once, samples.input_positions, 1), most, multiple, problem.modes[mode], strict=strict)
    if not pieces.is_piece.any():
        return None
    kept = once[pieces.sample]
    whole = samples.input_positions[pieces.sample]
    pieces = replace(pieces, end=np.where(kept, pieces.end, whole), length=np.where(kept, pieces.length, whole))
    return of_pieces(samples, problem, pieces, recompute=recompute, element_bytes=element_bytes)


def of_pieces(
    samples: Samples, problem: BatchProblem, pieces: Pieces, *, recompute: tuple[Recompute, ...], element_bytes: int
) -> CutCandidate:
    """The batch with these pieces in place of its samples; with the arguments of `cut_batch`."""
    positions = pieces.end - pieces.start
    entries = replace(
        samples,
        **{name: getattr(samples, name)[pieces.sample] for name in ("ids", "input_tokens", "target_tokens")},
        input_positions=positions,
        target_positions=np.zeros_like(positions),
        inputs=round_up_all(positions, problem.length_multiple),
        targets=np.zeros_like(positions),
        starts=pieces.start,
        labels=None if samples.labels is None else _labels(samples.labels[pieces.sample], pieces),
    )
    extras = [
        piece_costs(
            tables,
            mode,
            positions=positions * pieces.is_piece,
            before=pieces.start,
            later=pieces.later,
            element_bytes=element_bytes,
        )
        for tables, mode in zip(problem.modes, recompute, strict=True)
    ]
    cut_problem = replace(
        problem_of(problem, entries), chains=pieces.chains.astype(np.int32), piece_costs=np.stack(extras)
    )
    longest_first = OrderedPartitions(order=by_length(entries.inputs, entries.targets))
    return CutCandidate(pieces=pieces, samples=entries, problem=cut_problem, partitioned=longest_first)


def _labels(of_samples: IntArray, pieces: Pieces) -> IntArray:
    """Positions of each piece that count, where a sample's last ones do."""
    return np.asarray(np.maximum(pieces.end - np.maximum(pieces.start, pieces.length - of_samples), 0), np.int64)


def problem_of(problem: BatchProblem, samples: Samples) -> BatchProblem:
    """The problem of planning these samples in place of its own."""
    return replace(
        problem,
        inputs=samples.inputs,
        targets=samples.targets,
        input_positions=samples.input_positions,
        target_positions=samples.target_positions,
        labels=samples.labels,
    )
