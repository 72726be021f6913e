"""Whole plans of a run in a folder, one file each, for `show`, `verify` and `report`.

FOLDER/train/iteration-000012.plan      what `codec.encode` makes of it: samples and their lengths, shapes, bytes,
FOLDER/valid/iteration-000000.plan      instructions, predicted timeline
"""

import os
import re
from pathlib import Path

from megatron_dynapipe.errors import DataError, PlanDecodeError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.plan.codec import decode_plan, encode
from megatron_dynapipe.plan.iteration import IterationPlan

_NAME = re.compile(r"iteration-[0-9]{6,18}\.plan")


def dump_path(folder: Path, split: str, iteration: int) -> Path:
    """The file of an iteration's plan."""
    return folder / split / f"iteration-{iteration:06d}.plan"


def dump_plan(folder: Path, split: str, plan: IterationPlan) -> Path:
    """Write a plan; a reader finds it whole or not at all, whoever else writes the same. Raises OSError."""
    path = dump_path(folder, split, plan.iteration)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(encode(plan))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def dump_paths(folder: Path, split: str = "train") -> list[Path]:
    """The files of a split's plans, in the order of iterations; none where the folder has none."""
    found = (path for path in (folder / split).glob("iteration-*.plan") if _NAME.fullmatch(path.name))
    return sorted(found, key=lambda each: (len(each.name), each.name))


def read_dump(path: Path) -> IterationPlan:
    """The plan in a file.

    Raises:
        DataError: it cannot be read, or is no plan.
    """
    try:
        return decode_plan(read_bounded(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except PlanDecodeError as error:
        raise DataError(f"{path}: {error.message}", hint=error.hint) from error
