"""One checkout whose files are known, and changing all of them or none."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.patching.applying import exchange, run_patches, staged
from megatron_dynapipe.patching.record import MergeRecord
from megatron_dynapipe.patching.series import FileDigests, Series, digest
from megatron_dynapipe.patching.survey import State, Survey, survey

_KNOWN = (State.RELEASED, State.PATCHED, State.OUTDATED, State.MERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout whose touched files are all as released, all patched, or all merged.

    Attributes:
        found: its files.
    """

    found: Survey

    @property
    def folder(self) -> Path:
        """The one that holds `megatron/`."""
        return self.found.folder

    @property
    def state(self) -> State:
        """That of all its files."""
        return self.found.state

    @property
    def series(self) -> Series:
        """The patches of its version; of an outdated checkout those that are applied to it."""
        return self.found.applied

    @property
    def is_patched(self) -> bool:
        """Whether it makes the patches' calls: patched now, by an earlier release, or by a merge."""
        return self.state is not State.RELEASED

    @property
    def tool(self) -> str:
        """What applies patches here."""
        return "git" if self.found.is_git else "patch"

    def apply(self) -> None:
        """Apply the current series; an earlier release's is reversed first.

        Raises:
            PatchError: it does not apply; nothing was changed.
        """
        assert self.state in (State.RELEASED, State.OUTDATED)
        contents = self._contents()
        if self.state is State.OUTDATED:
            contents = self._change(contents, self.series, reverse=True)
        exchange(self.folder, self._change(contents, self.found.series, reverse=False))

    def reverse(self) -> None:
        """Reverse the applied series: the files are as released, or as they were merged with, byte for byte.

        Raises:
            PatchError: it cannot be reversed; nothing was changed.
        """
        assert self.is_patched
        if self.state is State.MERGED and self.found.record is not None:
            exchange(self.folder, self.found.record.originals(self.folder))
            MergeRecord.remove(self.folder)
            return
        exchange(self.folder, self._change(self._contents(), self.series, reverse=True))

    def _contents(self) -> dict[str, bytes]:
        return {name: (self.folder / name).read_bytes() for name in self.series.files}

    def _change(self, contents: Mapping[str, bytes], series: Series, *, reverse: bool) -> dict[str, bytes]:
        """Contents with a series applied or reversed, which must be what was tested."""
        with staged(contents) as stage:
            if failure := run_patches(self.tool, stage, series.patches, reverse=reverse):
                raise PatchError(f"{series.version} does not apply to {self.folder}: {failure}")
            changed = {name: (stage / name).read_bytes() for name in contents}
        for name, data in changed.items():
            if digest(data) != _expected(series.files[name], digest(contents[name]), reverse=reverse):
                raise PatchError(f"{name} differs from what was tested once patched; nothing was changed")
        return changed


def _expected(contents: Sequence[FileDigests], given: str, *, reverse: bool) -> str | None:
    pairs = ((each.after, each.before) if reverse else (each.before, each.after) for each in contents)
    return dict(pairs).get(given)


def examine(folder: Path, known: Sequence[Series]) -> Checkout:
    """Recognise a checkout by the content of the files that patches touch.

    Raises:
        PatchError: it is none, or a file is not as known; says which files are, and which are not.
    """
    found = survey(folder, known)
    if found.state not in _KNOWN:
        raise refusal(found, known)
    return Checkout(found=found)


def refusal(found: Survey, known: Sequence[Series]) -> PatchError:
    """Why the files of a checkout are neither all as released nor all patched."""
    if found.is_unlike_all:
        releases = ", ".join(name for series in known if series.is_current for name in series.releases)
        return PatchError(
            f"expected a checkout of one of the releases {releases}, found one that says {found.says},"
            " of which no file is known",
            hint="check out one of these; or --merge (in a git checkout, tried before it is kept); or put the checkout"
            " first on PYTHONPATH and use this project's entry scripts, which patch nothing",
        )
    is_patched = bool(found.named(State.PATCHED, State.OUTDATED))
    wanted = State.PATCHED if is_patched else State.RELEASED
    problem = f"expected {found.series.version} {wanted}, found " + "; ".join(
        f"{state}: {', '.join(names)}" for state in State if state is not wanted and (names := found.named(state))
    )
    if not is_patched and not found.named(State.MISSING):
        problem += f"; {_first_complaint(found) or 'every hunk applies all the same'}"
    return PatchError(problem, hint=_way_out(found, is_patched=is_patched))


def _first_complaint(found: Survey) -> str:
    tool = "git" if shutil.which("git") else "patch"
    with staged({file.name: (found.folder / file.name).read_bytes() for file in found.files}) as stage:
        return run_patches(tool, stage, found.series.patches, reverse=False)


def _way_out(found: Survey, *, is_patched: bool) -> str:
    if found.named(State.MISSING):
        return "check out the whole of Megatron-LM"
    if is_patched and found.named(State.MODIFIED):
        return "undo your changes of these files, or keep them: --reverse --merge takes out the patches alone"
    if is_patched:
        return "restore these files (git checkout -- FILE ...), then patch again"
    return "--merge merges the patches with your changes and tries them; or set the changes aside (git stash) and patch"
