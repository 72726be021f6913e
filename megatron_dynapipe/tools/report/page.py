"""A run as one HTML page that needs no network: facts, charts and timelines, drawn by the Plotly it contains."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from megatron_dynapipe import __version__
from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.extras import from_clone
from megatron_dynapipe.outputs import marked, write_file
from megatron_dynapipe.report.records import RunRecord
from megatron_dynapipe.report.summary import Summary
from megatron_dynapipe.tools.report.charts import run_charts, timeline_panels
from megatron_dynapipe.tools.report.run import Run

PAGE = "report.html"
"""Its name in the folder of a run."""

is_page = marked('<meta name="generator" content="megatron-dynapipe">')


def write_page(run: Run, summary: Summary, path: Path, *, title: str) -> Path:
    """Write the page.

    Raises:
        ConfigError: as `outputs.write_file`.
        InstallationError: Plotly, which the page contains, is not installed.
    """
    data = {
        "title": title,
        "version": __version__,
        "facts": _facts(summary),
        "about": _about(run.starts),
        "charts": run_charts(run),
        "timelines": timeline_panels(run.timelines),
    }
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")  # no text of a run ends its script
    template = resources.files("megatron_dynapipe.tools.report").joinpath("page.html").read_text("utf-8")
    head, _, rest = template.partition("/*PLOTLY*/")
    between, _, tail = rest.partition("/*DATA*/")
    write_file(path, "".join((head, _plotly(), between, text, tail)), is_ours=is_page)
    return path


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InstallationError(
            "expected Plotly, which draws the page of a run, found none", hint=from_clone("plots")
        ) from None
    return str(get_plotlyjs())


def _about(starts: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """The last start's description of itself, and where others began."""
    if not starts:
        return []
    *earlier, last = starts
    lines = list(last.about.items())
    for start in earlier:
        where = f"from iteration {start.first_iteration + 1}, {amount(start.world_size, 'rank')}"
        lines.append(("earlier start", ", ".join([where, *filter(None, map(start.about.get, ("layout", "began")))])))
    return lines


def _facts(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("iterations", f"{summary.iterations:,}"),
        ("tokens per second", f"{summary.tokens_per_second:,.0f}"),
        ("MFU", _share(summary.mfu)),
        ("padding efficiency", f"{summary.padding_efficiency:.1%}"),
        ("if all were padded to the longest", f"{summary.maximum_padding_efficiency:.1%}"),
        ("time per iteration", f"{summary.measured_ms:,.1f} ms"),
        ("error of predictions", _share(summary.prediction_error)),
        ("waiting for plans", f"{summary.plan_wait_share:.2%}"),
        ("micro-batches per iteration", f"{summary.micro_batches.median:g}"),
    ]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
