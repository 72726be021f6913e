"""`profile` on tiny models: the file it writes plans, and tensor-parallel ranks share the work."""

import contextlib
import importlib.metadata
import io
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron_dynapipe import __version__
from megatron_dynapipe.core.costs import ATTENTION, MLP
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import ABSENT, Quantity, TableCostModel
from megatron_dynapipe.extras import DISTRIBUTION
from tests.helpers.bridge_here import HAS_BRIDGE
from tests.helpers.processes import run_ranks

FLAGS = [
    *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "64", "--max-position-embeddings", "64"),
    *("--global-batch-size", "8", "--attention-dropout", "0", "--hidden-dropout", "0", "--dynapipe-device", "cpu"),
    *("--calculate-per-token-loss", "--train-iters", "1", "--lr", "1", "--eval-interval", "1"),
]
GPT = ["--num-layers", "2"]
T5 = ["--encoder-num-layers", "2", "--decoder-num-layers", "2", "--decoder-seq-length", "32"]


WITHOUT_BRIDGE = pytest.mark.skipif(HAS_BRIDGE, reason="Megatron-Bridge is here")


def run_command(rank: int, world_size: int, argv: list[str]) -> tuple[int, str, str]:
    """The command on one rank: exit status, standard output, standard error."""
    from megatron_dynapipe.cli.main import main

    distribution = importlib.metadata.distribution

    def of_others(name: str) -> importlib.metadata.Distribution:
        if name == DISTRIBUTION:  # it is used without being installed
            raise importlib.metadata.PackageNotFoundError(name)
        return distribution(name)

    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        with mock.patch.object(importlib.metadata, "distribution", of_others):
            status = main(argv)
    return status, output.getvalue(), errors.getvalue()


def profile(path: Path, *options: str, model: str, ranks: int = 1) -> tuple[int, str, str]:
    """Of rank 0."""
    argv = ["profile", "--model", model, "--output", str(path), "--vocabulary", "512", "--max-positions", "256"]
    argv += ["--budget-minutes", "0.06", *options, "--", *FLAGS, *(T5 if model == "t5" else GPT)]
    found: tuple[int, str, str] = run_ranks(run_command, ranks, {"argv": argv}, deadline_s=240)[0]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [pytest.param("t5", marks=pytest.mark.slow), "gpt"])
def test_a_profile_is_a_model_that_plans(model: str, tmp_path: Path) -> None:
    status, said, errors = profile(tmp_path / "m.json", "--recompute", "none,full", model=model)
    assert status == 0, errors
    assert said.strip() == str(tmp_path / "m.json") and not (tmp_path / "m.json.partial").exists()
    cost = TableCostModel.load(tmp_path / "m.json")
    assert cost.family is ModelFamily(model)
    none, full = (cost.tables(tensor_parallel=1, recompute=mode) for mode in (Recompute.NONE, Recompute.FULL))
    assert int(none.sizes[-1]) == 8 and int(none.inputs[-1]) == 64
    assert int(none.targets[-1]) == (32 if model == "t5" else 0)
    assert (none.values != ABSENT).all()
    assert (none.values[:, [Quantity.FORWARD, Quantity.BACKWARD]] > 0).all()
    kept = 32 + (model == "t5")  # a layer's input, and the mask of padded keys
    assert full.values[:2, Quantity.STORED, -1, -1, -1].sum() == pytest.approx(8 * 64 * kept * 4, rel=0.01)
    assert none.values[:2, Quantity.STORED, -1, -1, -1].sum() > 5 * full.values[:2, Quantity.STORED, -1, -1, -1].sum()
    # Weights of a layer: 4 of attention and 2 of the feed-forward (4 times as wide), biases and norms besides.
    assert none.state.modules[ATTENTION] + none.state.modules[MLP] == pytest.approx(2 * 12 * 32 * 32, rel=0.06)
    division = none.division
    assert division is not None
    assert division.parameters[0] / sum(division.parameters) == pytest.approx(4 / 12, rel=0.06)
    for tables, stores_apart in ((none, True), (full, False)):
        attention, layer = tables.values[0, Quantity.STORED], tables.values[:2, Quantity.STORED].sum(axis=0)
        peak = np.maximum(tables.values[0, Quantity.PEAK], attention + tables.values[1, Quantity.PEAK])
        assert (tables.values[1, Quantity.ENTRY_PEAK] < peak).all(), "a layer holds more than its MLP"
        assert (attention < 0.6 * layer).all() == stores_apart, "recomputed in full each half keeps its own input"
        assert tables.packed is not None
    assert division.forward.mlp > 0 and division.forward.linear + division.forward.inner > 0
    assert cost.file.provenance["dtype"] == "float32" and cost.file.provenance["ranks"] == 1
    assert cost.file.provenance["megatron-dynapipe"] == __version__


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_share_a_layer_and_measure_their_link(tmp_path: Path) -> None:
    status, _, errors = profile(
        tmp_path / "m.json", "--tensor-parallel", "2", "--recompute", "none", model="gpt", ranks=2
    )
    assert status == 0, errors
    file = json.loads((tmp_path / "m.json").read_text())
    assert list(file["keys"]) == ["tp2_none"]
    for kind in ("intra-node", "gathers"):
        assert file["links"][kind]["gbps"] > 0 and file["links"][kind]["latency_us"] > 0
    state = TableCostModel.load(tmp_path / "m.json").tables(tensor_parallel=2, recompute=Recompute.NONE).state
    assert sum(state.modules.values()) == pytest.approx(12 * 32 * 32, rel=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recompute", "some"], "expected recompute modes of none, selective, full, got some"),
        (["--budget-minutes", "0"], "argument --budget-minutes: expected a number above 0"),
        (["--tensor-parallel", "2"], "expected a number of ranks that 2 divides, got 1"),
        (["--peft-dim", "8"], "--peft-dim goes with --peft, which was not given"),
        pytest.param(
            ["--peft", "lora"], "the package megatron-bridge, which the extra [bridge] brings", marks=WITHOUT_BRIDGE
        ),
    ],
)
def test_what_cannot_be_profiled_is_said(options: list[str], message: str, tmp_path: Path) -> None:
    status, _, errors = profile(tmp_path / "m.json", *options, model="gpt")
    assert status == 2 and message in errors
