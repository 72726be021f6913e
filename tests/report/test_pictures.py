import json

from matplotlib.image import imread

from megatron_dynapipe.core.instructions import Backward, Forward, Payload, RecvWait
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.report import timeline
from megatron_dynapipe.report.timeline import draw
from megatron_dynapipe.report.trace import Panel, write_trace
from tests.helpers.plans import make_plan

PLAN = make_plan((4,), 3)
TIMELINE = tuple(stage.predicted for stage in PLAN.replicas[0].stages)


def test_planned_above_measured_with_numbered_passes_on_a_row_per_stage(tmp_path):
    """And a stripe for the pieces of a sample on every stage."""
    wait = [(Event(RecvWait(Payload.ACTIVATION, 0, 0, 0), 0, events[0].start_ns), *events) for events in TIMELINE]
    panels = [Panel("planned", TIMELINE, [(0, 1), (1, 2)]), Panel("measured", tuple(wait))]
    text = draw(panels, tmp_path / "made" / "both.svg").read_text()
    assert "<svg" in text and text.index("planned") < text.index("measured")
    kinds = ("forward", "backward", "idle", "waiting for a transfer", "pieces of one sample (a colour each)")
    for label in ("stage 0", "stage 2", *kinds):
        assert f"<!-- {label} -->" in text
    assert text.count("<!-- 3 -->") >= 2 * 3 * 2  # micro-batch 3, forward and backward on every stage
    assert text.count(timeline.CHAINS[1]) == 3 * 2 * 2 and text.count(timeline.CHAINS[0]) > 3 * 2 * 2  # and the legend


def test_panels_have_one_time_scale_and_say_how_idle_they_are(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(timeline, "save", lambda figure, path: drawn.extend(figure.axes))
    idle = ((Event(Forward(0), 0, 150), Event(Backward(0), 150, 300)), (Event(Forward(0), 150, 300),))
    draw([Panel("short", ((Event(Forward(0), 0, 100),),)), Panel("long", idle)], tmp_path)
    assert [axis.get_xlim()[1] for axis in drawn] == [300e-6, 300e-6]
    assert "stages idle 25% of the time" in drawn[1].get_title() + drawn[1].get_title("left")
    for empty in (((), ()), ((Event(Forward(0), 0, 0),),)):
        draw([Panel("nothing", empty)], tmp_path)


def test_png_shows_both_colours(tmp_path):
    pixels = imread(draw([Panel("planned", TIMELINE)], tmp_path / "planned.png"))[:, :, :3]
    blue = (pixels[:, :, 2] - pixels[:, :, 0] > 0.2).mean()
    orange = (pixels[:, :, 0] - pixels[:, :, 2] > 0.3).mean()
    assert blue > 0.02 and orange > 0.02


def test_a_trace_has_a_process_per_timeline_and_a_thread_per_stage(tmp_path):
    path = write_trace([Panel("planned", TIMELINE), Panel("measured", TIMELINE)], tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"planned", "measured", "stage 0", "stage 1", "stage 2"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * 3 * 8
    first = next(event for event in slices if (event["pid"], event["tid"]) == (0, 0))
    assert (first["name"], first["cat"], first["ts"]) == ("F0", "forward", 0)
    assert first["dur"] == TIMELINE[0][0].end_ns / 1000


def test_the_legend_explains_paler_passes_of_virtual_stages(tmp_path):
    later = ((Event(Forward(0), 0, 100), Event(Forward(0, 1), 100, 200)),)
    text = draw([Panel("chunks", later)], tmp_path / "chunks.svg").read_text()
    assert "<!-- paler: later virtual stages of a stage (2) -->" in text
    assert "paler" not in draw([Panel("planned", TIMELINE)], tmp_path / "alone.svg").read_text()
