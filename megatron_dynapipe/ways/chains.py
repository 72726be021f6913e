"""Samples that are cut along their sequence, in pieces that run one after another.

    micro-batch    0              1              2
    row            [7: 0…511 ]    [7: 512…911 | 3 ]   [7: 912…1180 | 9 | 4 ]

The pieces of sample 7 are a chain: on every virtual stage their forward passes run up, since each attends to the keys
and values of those before it, and their backward passes down, since each has gradients of keys and values for those
before it; of divided backward passes the halves that make the inputs' gradients, the others run in any order.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import EFFECTS, PASS_TYPES, Instruction, Pass, Work
from megatron_dynapipe.core.plan import MicroBatch, Piece
from megatron_dynapipe.core.units import ModelFamily, sequence_positions


def cut_entries(micro_batch: MicroBatch) -> Iterator[tuple[int, Piece]]:
    """(place in the row, positions) of a micro-batch's entries that are pieces, not whole samples."""
    for at, (piece, tokens) in enumerate(zip(micro_batch.pieces, micro_batch.input_lengths, strict=False)):
        if piece != (0, sequence_positions(tokens)):
            yield at, piece


def chains(micro_batches: Sequence[MicroBatch]) -> Mapping[int, Sequence[int]]:
    """The micro-batches of each cut sample's pieces, in the order of its positions."""
    chains: dict[int, list[tuple[Piece, int]]] = defaultdict(list)
    for number, micro_batch in enumerate(micro_batches):
        for at, piece in cut_entries(micro_batch):
            chains[micro_batch.sample_ids[at]].append((piece, number))
    return {sample: [number for _, number in sorted(pieces)] for sample, pieces in chains.items()}


def check_pieces(family: ModelFamily, replica: int, micro_batches: Sequence[MicroBatch]) -> None:
    """Raise a PlanError unless the pieces of every sample that is cut tile it, each in another micro-batch."""
    chains: dict[int, list[tuple[Piece, int, int]]] = defaultdict(list)
    for number, micro_batch in enumerate(micro_batches):
        for at, piece in cut_entries(micro_batch):
            chains[micro_batch.sample_ids[at]].append((piece, number, micro_batch.input_lengths[at]))
    for sample, pieces in chains.items():
        where = f"replica {replica}, sample {sample}"
        if family.is_encoder_decoder:
            raise PlanError(f"{where}: expected whole samples of a {family} model, got a piece")
        end = 0
        for piece, number, _ in sorted(pieces):
            if piece.start != end or piece.end <= piece.start:
                raise PlanError(
                    f"{where}: expected a piece from position {end} on, got {piece.start} to {piece.end} in "
                    f"micro-batch {number}"
                )
            end = piece.end
        lengths = {sequence_positions(tokens) for _, _, tokens in pieces}
        if lengths != {end}:
            raise PlanError(f"{where}: expected pieces up to position {max(lengths)}, got {end}")
        if len({number for _, number, _ in pieces}) < len(pieces):
            raise PlanError(f"{where}: expected every piece in a micro-batch of its own, got two in one")


def check_chain_order(stage: int, micro_batches: Sequence[MicroBatch], passes: Sequence[Instruction]) -> None:
    """Raise a PlanError where a stage runs a chain's forward passes not up or its backward passes not down.

    Args:
        stage: the passes', for the message.
        micro_batches: the replica's.
        passes: forward and backward passes of the stage, in order, each once.
    """
    cut = chains(micro_batches)
    if not cut:
        return
    at = {step: place for place, step in enumerate(passes)}
    chunks = sorted({step.chunk for step in passes if isinstance(step, Pass)})
    for sample, chain in cut.items():
        for chunk in chunks:
            for work, numbers in ((Work.FORWARD, chain), (Work.BACKWARD, [*reversed(chain)])):
                kinds = [kind for kind in PASS_TYPES if EFFECTS[kind].work is work]
                runs = [kind(number, chunk) for number in numbers for kind in kinds]
                places = [at[run] for run in runs if run in at]
                if places != sorted(places):
                    raise PlanError(
                        f"stage {stage}: expected the {work} passes of sample {sample}'s pieces in the order of "
                        f"micro-batches {', '.join(map(str, numbers))}, got another"
                    )
