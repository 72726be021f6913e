"""The measured points, on disk, so that an interrupted profile continues where it stopped.

{"settings": "…"}                                                            what the measurements are of
{"part": "encoder", "recompute": "none", "point": [1, 8], "forward_ns": …}   one measurement to a line
"""

from pathlib import Path
from typing import Annotated

import msgspec

from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.units import Recompute

_AtLeastZero = Annotated[int, msgspec.Meta(ge=0)]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One part at one point under one recompute mode; `fits` is False where memory ran out."""

    part: str
    recompute: Recompute
    point: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    fits: bool = True
    forward_ns: _AtLeastZero = 0
    backward_ns: _AtLeastZero = 0
    stored_bytes: _AtLeastZero = 0
    peak_bytes: _AtLeastZero = 0


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    settings: str


class Journal:
    """A file of measurements that grows by a line each.

    Args:
        path: the file; None keeps nothing (ranks other than the first).
        settings: what tells these measurements from others: model, device, versions.

    Raises:
        CostModelError: the file holds measurements of something else, or is damaged.
    """

    def __init__(self, path: Path | None, settings: str) -> None:
        self._path = path
        self.found: list[Measurement] = []
        if path is None:
            return
        if path.exists():
            self.found = _read(path, settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(_Header(settings)) + b"\n")

    def add(self, measurement: Measurement) -> None:
        """Write one down."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(measurement) + b"\n")

    def remove(self) -> None:
        """All is measured and kept elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _read(path: Path, settings: str) -> list[Measurement]:
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()  # an interrupted write leaves half a line
    hint = f"delete {path} to measure everything again"
    try:
        header = msgspec.json.decode(lines[0], type=_Header) if lines else _Header("")
        found = [msgspec.json.decode(line, type=Measurement) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise CostModelError(f"{path} is not a journal of measurements: {error}", hint=hint) from error
    if header.settings != settings:
        raise CostModelError(
            f"{path} holds measurements of another model, device or version:\n  {header.settings}\n"
            f"not of\n  {settings}",
            hint=hint,
        )
    if len(data) > data.rfind(b"\n") + 1:
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    return found
