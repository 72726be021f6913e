"""What one rank of a run under test leaves for the comparison: a JSON file, and its gradients as safetensors."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file

from megatron_dynapipe.tools.certify.parts import Part


class RankRecord(msgspec.Struct, kw_only=True):
    """One rank's part of a run under test.

    Attributes:
        replica: of the rank.
        losses, norms: of every iteration, as Megatron logs them; losses on the last stage alone.
        samples: by number, sum and number of the losses that count, in the first iteration, on the last stage.
        places: where the plan put each sample of this replica, in words; empty without a plan.
        parts: of each set of gradients by its name, its parts without their values.
        repeated: by which part of itself the first iteration's gradient moved when it was run again.
        recomputed: the same where nothing is computed again.
        moved: by stage, the furthest that a sample moved while others changed, as a part of the largest state, and
            which sample.
        small: names of the parameters whose gradients of each sample are in the set "samples".
        order: numbers of those samples.
    """

    replica: int = 0
    losses: list[float] = []
    norms: list[float] = []
    samples: dict[int, tuple[float, float]] = {}
    places: dict[int, str] = {}
    parts: dict[str, list[tuple[str, list[int], list[int]]]] = {}
    repeated: float = 0.0
    recomputed: float = 0.0
    moved: dict[int, tuple[float, str]] = {}
    small: list[str] = []
    order: list[int] = []

    def write(self, folder: Path, rank: int) -> None:
        """Write what is not a tensor; rank by rank."""
        (folder / f"rank-{rank}.json").write_bytes(msgspec.json.encode(self))

    def add_parts(self, folder: Path, rank: int, name: str, parts: Sequence[Part]) -> None:
        """Write a set of gradients."""
        self.parts[name] = [(key, offset, shape) for key, offset, shape, _ in parts]
        save_file({str(at): part[3].contiguous() for at, part in enumerate(parts)}, _tensors(folder, rank, name))


def _tensors(folder: Path, rank: int, name: str) -> Path:
    return folder / f"rank-{rank}.{name}.safetensors"


def read_records(folder: Path) -> list[RankRecord]:
    """Every rank's record, in order."""
    count = len(list(folder.glob("rank-*.json")))
    files = (folder / f"rank-{rank}.json" for rank in range(count))
    return [msgspec.json.decode(file.read_bytes(), type=RankRecord) for file in files]


def read_parts(folder: Path, records: Sequence[RankRecord], name: str) -> list[list[Part]]:
    """A set of gradients of every rank."""
    parts = []
    for rank, record in enumerate(records):
        tensors = load_file(_tensors(folder, rank, name))
        parts.append([(*place, tensors[str(at)]) for at, place in enumerate(record.parts[name])])
    return parts
