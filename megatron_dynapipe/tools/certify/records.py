"""The record that one rank of a run under test leaves for the comparison: a file of safetensors."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Part = tuple[str, list[int], list[int], torch.Tensor]
"""A rank's part of a parameter: name, place in the whole, the whole's shape, values."""


class RankRecord(msgspec.Struct, kw_only=True):
    """One rank's part of a run under test.

    Attributes:
        losses, norms: of every iteration, as Megatron logs them; losses on the last stage alone.
        samples: by number, sum and number of the losses that count, in the first iteration, on the last stage.
        places: where the plan put each sample of this replica, in words; empty without a plan.
        repeated: by which part of itself a parameter's gradient of the first iteration moved at most when that was run
            again, and which parameter's.
        recomputed: the same where nothing is computed again.
        moved: by stage, the furthest that a sample moved while others changed, as a part of the largest state, and
            which sample.
        notes: lines on the samples that are trained, for whoever asked for the certificate.
        device: that it ran on, a kind of torch's.
        parts: sets of gradients by name; a file has their names and places, and the values apart.
    """

    losses: list[float] = []
    norms: list[float] = []
    samples: dict[int, tuple[float, float]] = {}
    places: dict[int, str] = {}
    repeated: tuple[float, str] = (0.0, "")
    recomputed: tuple[float, str] = (0.0, "")
    moved: dict[int, tuple[float, str]] = {}
    notes: list[str] = []
    device: str = "cpu"
    parts: dict[str, list[Part]] = {}

    def write(self, folder: Path, rank: int) -> None:
        """Write the rank's file."""
        tensors = {f"{name} {at}": part[3] for name, parts in self.parts.items() for at, part in enumerate(parts)}
        fields = msgspec.to_builtins(self, str_keys=True, enc_hook=lambda tensor: None)
        text = json.dumps(fields)  # whose numbers may be NaN, as a loss is that has diverged
        save_file(tensors, folder / f"rank-{rank}", metadata={"record": text})


def read_records(folder: Path) -> Sequence[RankRecord]:
    """Every rank's record, in order."""
    records = []
    for rank in range(len(list(folder.glob("rank-*")))):
        with safe_open(folder / f"rank-{rank}", framework="pt") as file:
            fields = json.loads(file.metadata()["record"])
            parts = fields.pop("parts")
            record = msgspec.convert(fields, RankRecord, str_keys=True)
            record.parts = {
                name: [(*place[:3], file.get_tensor(f"{name} {at}")) for at, place in enumerate(places)]
                for name, places in parts.items()
            }
        records.append(record)
    return records
