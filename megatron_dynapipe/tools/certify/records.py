"""The record that one rank of a run under test leaves for the comparison: a file of safetensors."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

GRADIENTS, REVERSED, SAMPLES, UPDATES = "gradients", "reversed", "samples", "updates"
MOMENTS = {
    "adam": {"exp_avg": "first moments", "exp_avg_sq": "second moments"},
    "sgd": {"momentum_buffer": "momentum"},
}
"""Sets of parts; the optimizer's state by `--optimizer` and its own names."""

Part = tuple[str, list[int], list[int], torch.Tensor]
"""A rank's part of a parameter: name, place in the whole, the whole's shape, values."""


class RankRecord(msgspec.Struct, kw_only=True):
    """One rank's part of a run under test.

    Attributes:
        losses, norms: every iteration's, as Megatron logs them; losses on the last stage alone.
        samples: by number, sum and number of the losses that count, in the first iteration, on the last stage.
        places: where the plan put each sample of this replica, in words; empty without a plan.
        repeated: by which part of itself a parameter's gradient of the first iteration moved at most when that was run
            again, and which parameter's.
        recomputed: the same where nothing is computed again.
        moved: by stage, the furthest that a sample moved while others changed, as a part of the largest state, and
            which sample.
        notes: lines on the samples that are trained, for whoever asked for the certificate.
        device: that it ran on, a kind of torch's.
        half: the half precision that a recipe trains in; empty for none.
        unfrozen: frozen weights that have changed; None if no weights are frozen.
        parts: sets of gradients, of updates and moments after the last step, by name; a file has their names and
            places, and the values apart.
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
    half: str = ""
    unfrozen: list[str] | None = None
    parts: dict[str, list[Part]] = {}

    def write(self, folder: Path, rank: int) -> None:
        """Write the rank's file."""
        tensors = {f"{name} {at}": part[3] for name, parts in self.parts.items() for at, part in enumerate(parts)}
        fields = msgspec.to_builtins(self, str_keys=True, enc_hook=lambda tensor: None)
        text = json.dumps(fields)  # whose numbers may be NaN, as a loss is that has diverged
        save_file(tensors, folder / f"rank-{rank}", metadata={"record": text})


def read_records(folder: Path) -> Sequence[RankRecord]:
    """Every rank's record, in order, whose parts are not read."""
    records = []
    for _, fields in _files(folder):
        fields["parts"] = {name: [] for name in fields["parts"]}
        records.append(msgspec.convert(fields, RankRecord, str_keys=True))
    return records


def read_parts(folder: Path, name: str) -> Sequence[Sequence[Part]]:
    """One set of every rank's, in order: a large model's sets are not held at once."""
    return [
        [(*place[:3], file.get_tensor(f"{name} {at}")) for at, place in enumerate(fields["parts"][name])]
        for file, fields in _files(folder)
    ]


def _files(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    for rank in range(len(list(folder.glob("rank-*")))):
        with safe_open(folder / f"rank-{rank}", framework="pt") as file:
            yield file, json.loads(file.metadata()["record"])
