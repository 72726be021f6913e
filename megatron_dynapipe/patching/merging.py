"""Patches merged into files that someone has changed: three-way where git has what they were made from.

as released ──── the patches ───▶ patched
    │                                │
your changes                         │
    ▼                                ▼
your file ───────────────────────▶ merged
"""

from collections.abc import Callable
from pathlib import Path

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.patching.applying import exchange, run_patches, run_tool, staged
from megatron_dynapipe.patching.record import MergeRecord
from megatron_dynapipe.patching.series import FileDigests, digest
from megatron_dynapipe.patching.survey import FileReport, State, Survey


def merge(found: Survey, trial: Callable[[Path], None]) -> None:
    """Merge the patches into a checkout's files, try it, and keep them only if that succeeds.

    Args:
        found: files as released, patched or modified.
        trial: trains in the folder; what it raises is raised on, and the files are as they were.

    Raises:
        PatchError: there is a conflict, or a file is missing; nothing was changed.
    """
    contents = merged(found)
    originals = {name: (found.folder / name).read_bytes() for name in found.series.files}
    digests = {name: digest(contents.get(name, data)) for name, data in originals.items()}
    record = MergeRecord(version=found.series.version, is_tried=False, files=digests)
    record.write(found.folder, originals)
    try:
        exchange(found.folder, contents)
        trial(found.folder)
    except BaseException:
        exchange(found.folder, originals)
        MergeRecord.remove(found.folder)
        raise
    MergeRecord(version=record.version, is_tried=True, files=record.files).write(found.folder)


def merged(found: Survey, *, reverse: bool = False) -> dict[str, bytes]:
    """What the files become: with the patches in them, or, in `reverse`, without them.

    Raises:
        PatchError: a file is missing, or is patched by an earlier release, or its changes and the patches conflict.
    """
    wrong = found.named(State.MISSING, State.OUTDATED)
    if wrong:
        raise PatchError(f"expected files to merge with, found missing or patched before: {', '.join(wrong)}")
    done = State.RELEASED if reverse else State.PATCHED
    files = [file for file in found.files if file.state is not done]
    return {file.name: _one(found, file, reverse=reverse) for file in files}


def _one(found: Survey, file: FileReport, *, reverse: bool) -> bytes:
    """One file with its patches merged in, or taken out."""
    mine = (found.folder / file.name).read_bytes()
    base = _released(found, file) if file.state is State.MODIFIED else None
    if base is None:  # as it is known, or its origin is not to be had: the patches' own context says where they go
        return _patched(found, file, mine, reverse=reverse)
    theirs = _patched(found, file, base, reverse=False)
    first, second = (theirs, base) if reverse else (base, theirs)
    with staged({"mine": mine, "base": first, "theirs": second}) as stage:
        done = run_tool(["git", "merge-file", "-p", "mine", "base", "theirs"], stage)
    if done.returncode:
        lines = [str(at) for at, line in enumerate(done.stdout.splitlines(), 1) if line.startswith(b"<<<<<<< ")]
        raise PatchError(
            f"{file.name}: your changes and the patches conflict at line {', '.join(lines)} of the merged file;"
            " nothing was changed",
            hint=f"merge by hand (git am -3 {found.series.patches[0].path.parent}/*.patch): a run checks at its start"
            " that every call is there",
        )
    return done.stdout


def _patched(found: Survey, file: FileReport, data: bytes, *, reverse: bool) -> bytes:
    own = [patch for patch in found.series.patches if file.name in patch.files]
    with staged({file.name: data}) as stage:
        if failure := run_patches("git" if found.is_git else "patch", stage, own, reverse=reverse):
            raise PatchError(
                f"{failure}; nothing was changed",
                hint="a three-way merge needs a git checkout with the released file in its history"
                " (git fetch --unshallow --tags); otherwise merge by hand",
            )
        return (stage / file.name).read_bytes()


def _released(found: Survey, file: FileReport) -> bytes | None:
    """The released content that a modified file comes from, out of the checkout's history."""
    if not found.is_git:
        return None

    def is_said(content: FileDigests) -> bool:
        return found.says in content.releases

    for content in sorted(found.series.files[file.name], key=is_said, reverse=True):
        done = run_tool(["git", "cat-file", "blob", content.blob], found.folder)
        if done.returncode == 0 and digest(done.stdout) == content.before:
            return done.stdout
    return None
