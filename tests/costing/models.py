"""Small cost model files for tests."""

from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing.document import UNITS
from megatron_dynapipe.costing.format import CostEntry, CostFile, to_table

SIZES, LENGTHS = (1, 2, 4), (8, 16, 32)


def gpt_file(scale: float = 1.0) -> CostFile:
    """A decoder-only file over 3 × 3 points: forward b·s ms, backward twice that, stored 2·b·s MB, peak 3·b·s MB."""
    points = {(b, s): float(b * s) * scale for b in SIZES for s in LENGTHS}

    def table(times: float) -> dict[str, list[tuple[int, float]]]:
        return to_table({point: value * times for point, value in points.items()})

    entry = CostEntry(
        tp=1,
        recompute=Recompute.NONE,
        model_state_mb={"embedding": 4.0, "encoder": 2.0},
        time_ms={
            "encoder.forward": table(1),
            "encoder.backward": table(2),
            "postprocess.forward": table(0.5),
            "postprocess.backward": table(0.7),
        },
        stored_activation_mb={"encoder": table(2)},
        peak_activation_mb={"encoder": table(3)},
    )
    return CostFile(name="small", source="test", device="none", units=UNITS, model={}, keys={"tp1_none": entry})
