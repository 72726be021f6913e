"""What each file that patches touch is in a checkout: known by its content, never by the version it says."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dynapipe.errors import PatchError
from megatron_dynapipe.megatron_version import version_of
from megatron_dynapipe.patching.record import MergeRecord
from megatron_dynapipe.patching.series import FileDigests, Series, digest

_PACKAGE_INFO = Path("megatron/core/package_info.py")


class State(enum.StrEnum):
    """How a file, or a whole checkout, stands to a series."""

    RELEASED = "as released"
    PATCHED = "patched"
    OUTDATED = "patched by an earlier release"
    MERGED = "merged with the patches"
    MODIFIED = "modified"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file.

    Attributes:
        name: relative to the checkout.
        state: what its content is.
        content: the known one; None if it is modified, merged or missing.
        makes_calls: of a modified file, whether it holds every line that the patches add to it.
    """

    name: str
    state: State
    content: FileDigests | None = None
    makes_calls: bool = False

    def __str__(self) -> str:
        if self.content is not None:
            return f"{self.name}: {self.state} ({', '.join(self.content.releases)})"
        return f"{self.name}: {self.state}{', with every line of the patches in it' if self.makes_calls else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A checkout as it was found.

    Attributes:
        folder: the one that holds `megatron/`.
        says: the version in its `package_info.py`.
        series: of all current ones, the nearest.
        applied: the series whose lines are in patched files: `series`, or an earlier release's.
        files: that the series touches.
        record: of an earlier merge, if there was one.
    """

    folder: Path
    says: str
    series: Series
    applied: Series
    files: Sequence[FileReport]
    record: MergeRecord | None

    @property
    def state(self) -> State:
        """Of all files; MODIFIED if they differ."""
        states = {file.state for file in self.files}
        return states.pop() if len(states) == 1 else State.MODIFIED

    @property
    def is_git(self) -> bool:
        """Whether it is a git checkout."""
        return (self.folder / ".git").exists()

    @property
    def is_unlike_all(self) -> bool:
        """Whether no file is known, nor the version of any series said."""
        return _likeness(self) == (0, False)

    def named(self, *states: State) -> list[str]:
        """The files in one of these states."""
        return [file.name for file in self.files if file.state in states]


def survey(folder: Path, known: Sequence[Series]) -> Survey:
    """Look at a checkout's files.

    Raises:
        PatchError: the folder holds no Megatron.
    """
    if not (folder / "megatron").is_dir():
        raise PatchError(
            f"expected a Megatron-LM checkout in {folder}, found no folder megatron/ there",
            hint="give the folder that holds megatron/ and pretrain_gpt.py",
        )
    says = version_of(folder / _PACKAGE_INFO) if (folder / _PACKAGE_INFO).is_file() else "no version"
    record = MergeRecord.read(folder)
    candidates = [
        _against(folder, says, series, earlier, record)
        for series in known
        if series.is_current
        for earlier in [next((s for s in known if not s.is_current and s.version == series.version), None)]
    ]
    best = max(map(_likeness, candidates))
    return next(each for each in reversed(candidates) if _likeness(each) == best)  # the newest of equals


def _against(folder: Path, says: str, series: Series, earlier: Series | None, record: MergeRecord | None) -> Survey:
    """The files as the current series, and the earlier one of its version, know them."""
    digests = {name: digest((folder / name).read_bytes()) for name in series.files if (folder / name).is_file()}
    choices: dict[State, dict[str, FileDigests]] = {
        State.RELEASED: _known(series, digests, "before"),
        State.PATCHED: _known(series, digests, "after"),
        State.OUTDATED: _known(earlier, digests, "after") if earlier else {},
    }
    # A file can be the same in two of them: a state that all files share comes first.
    order = sorted(choices, key=lambda state: len(choices[state]) < len(series.files))
    is_merged = record is not None and record.describes(digests)

    def report(name: str) -> FileReport:
        if is_merged:
            return FileReport(name=name, state=State.MERGED)
        if name not in digests:
            return FileReport(name=name, state=State.MISSING)
        for state in order:
            if name in choices[state]:
                return FileReport(name=name, state=state, content=choices[state][name])
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        return FileReport(name=name, state=State.MODIFIED, makes_calls=_makes_calls(series, name, text))

    files = tuple(map(report, series.files))
    is_outdated = earlier is not None and all(file.state is State.OUTDATED for file in files)
    applied = earlier if is_outdated and earlier else series
    return Survey(folder=folder, says=says, series=series, applied=applied, files=files, record=record)


def _known(series: Series, digests: dict[str, str], kind: str) -> dict[str, FileDigests]:
    """The files whose content is one of a series', before or after it."""
    return {
        name: content
        for name, contents in series.files.items()
        for content in contents
        if digests.get(name) == getattr(content, kind)
    }


def _makes_calls(series: Series, name: str, text: str) -> bool:
    added = [line for patch in series.patches if name in patch.files for line in patch.added_lines]
    return all(text.count(line) >= added.count(line) for line in added if line.strip())


def _likeness(found: Survey) -> tuple[int, bool]:
    """Files that are known, then whether the version is that of a release of the series."""
    hits = sum(file.content is not None or file.state is State.MERGED for file in found.files)
    return hits, found.series.version == f"core_v{found.says}" or found.says in found.series.releases
