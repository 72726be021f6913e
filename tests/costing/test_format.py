"""Cost model files: strict reading, exact writing, what their tables answer."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynapipe.core.costs import DECODER_ATTENTION
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import (
    ABSENT,
    CPU_RATES,
    LARGEST_COST,
    AnalyticCostModel,
    CostTables,
    ModelShape,
    Quantity,
    TableCostModel,
)
from megatron_dynapipe.costing.format import decode_file, encode_file, read_file
from tests.costing.models import gpt_file
from tests.helpers.packed_costs import packed_costs
from tests.helpers.stage_costs import GPT_KINDS, STATE, grid_values

GOOD: dict[str, Any] = json.loads(encode_file(gpt_file()))


POSITIONS = {"8": 10.0, "24": 90.0}
PACKED: dict[str, Any] = {
    "time_ms": {
        "encoder.forward": {"linear": POSITIONS, "attention": {"8": 1.0, "16": 4.0}},
        "encoder.backward": {"linear": POSITIONS, "attention": {"8": 2.0, "16": 8.0}},
        "postprocess.forward": {"linear": {"8": 1.0, "24": 3.0}},
        "postprocess.backward": {"linear": {"8": 1.0, "24": 3.0}},
    },
    "stored_activation_mb": {"encoder": {"linear": POSITIONS, "attention": {"8": 0.0, "16": 0.0}}},
    "peak_activation_mb": {"encoder": {"linear": POSITIONS, "attention": {"8": 0.5, "16": 0.5}}},
}


def packed_file(change: Callable[[dict[str, Any]], None] = lambda document: None) -> bytes:
    document = json.loads(json.dumps(GOOD | {"format": "dynapipe-cost-model/2"}))
    document["keys"]["tp1_none"]["packed"] = json.loads(json.dumps(PACKED))
    change(document)
    return json.dumps(document).encode()


def at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one field of a file; the value `...` deletes it."""

    def change(document: dict[str, Any]) -> None:
        *parents, last = path
        holder: Any = document
        for name in parents:
            holder = holder[name]
        if value is ...:
            del holder[last]
        else:
            holder[last] = value

    return change


FORWARD = ("keys", "tp1_none", "time_ms", "encoder.forward")
IN_PACKED = ("keys", "tp1_none", "packed")
HALVED = {"forward": [1, 1, 1], "backward": [1, 1, 1], "stored": [[1, 0, 1], [1, 0, 1]], "parameters": [1, 2]}
PACKED_FORWARD = (*IN_PACKED, "time_ms", "encoder.forward")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at("format", value="dynapipe-cost-model/3"), "expected format 'dynapipe-cost-model/1' or 'dynapipe"),
        (at("format", value="dynapipe-cost-model/1"), "packed rows need format 'dynapipe-cost-model/2'"),
        (at("surprise", value=1), "surprise"),
        (at("keys", value={}), r"at `\$.keys`"),
        (at("keys", "tp1_none", "tp", value=0), r"at `\$.keys\[...\].tp`"),
        (at("keys", "tp1_none", "tp", value=2**70), r"\.tp"),
        (at("keys", "tp1_none", "model_state_mb", "encoder", value=1e300), "model_state_mb"),
        (at("links", value={"intra-node": {"latency_us": 1e300, "gbps": 1.0}}), "latency_us"),
        (at("keys", "tp1_none", "tp", value=2), "key 'tp1_none' holds the tables of 'tp2_none'"),
        (at("keys", "tp1_none", "recompute", value="some"), r"at `\$.keys\[...\].recompute`"),
        (at("keys", "tp1_none", "model_state_mb", value={"embedding": 1.0}), "lacks"),
        (at("keys", "tp1_none", "time_ms", "decoder.forward", value={"8,8": [[1, 1.0]]}), "expected time_ms of"),
        (at(*FORWARD, value=...), "expected time_ms of"),
        (at(*FORWARD, value={}), "encoder.forward: the table is empty"),
        (at(*FORWARD, "8,8", value=[[1, 1.0]]), "expected keys of 1 positive length"),
        (at(*FORWARD, "0", value=[[1, 1.0]]), "expected keys of 1 positive length"),
        (at(*FORWARD, "word", value=[[1, 1.0]]), "expected keys of 1 positive length"),
        (at(*FORWARD, value={str(2**70): [[1, 1.0]]}), "expected keys of 1 positive length"),
        (at(*FORWARD, value={"9" * 5000: [[1, 1.0]]}), "expected keys of 1 positive length"),
        (at(*FORWARD, "8", value=[[0, 1.0]]), r"time_ms"),
        (at(*FORWARD, "8", value=[[2**70, 1.0]]), r"time_ms"),
        (at(*FORWARD, "8", value=[[1, -1.0]]), "expected a cost of 0 or more at length 8, size 1, got -1.0"),
        (at(*FORWARD, "8", value=[[1]]), r"time_ms"),
        (at(*PACKED_FORWARD, value=...), "expected packed time_ms of"),
        (at(*IN_PACKED, "time_ms", "decoder.forward", value={"linear": POSITIONS}), "expected packed time_ms of"),
        (at(*PACKED_FORWARD, "linear", value={"8,8": 1.0}), "keys of 1 positive length"),
        (at(*PACKED_FORWARD, "linear", value={}), "the table is empty"),
        (at(*PACKED_FORWARD, "linear", value={"8": -1.0}), "Expected `float` >= 0"),
        (at(*IN_PACKED, "surprise", value={}), "surprise"),
        (at("keys", "tp1_none", "division", value={"decoder": HALVED}), r"tp1_none: division lacks \['encoder'\]"),
        (at(*IN_PACKED, "division", value={"decoder": HALVED}), r"tp1_none: division lacks \['encoder'\]"),
        (
            at("keys", "tp1_none", "division", value={"encoder": HALVED | {"parameters": [0, 0]}}),
            "expected parameters of attention or of the MLP above 0",
        ),
    ],
)
def test_a_damaged_file_is_refused_naming_the_field(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        TableCostModel.decode(packed_file(change), origin="the file")


NOTHING = [b"", b"{", b"[]", b'{"format": "dynapipe-cost-model/1"}', b"\xff"]
PICKLES = [b"\x80\x04]q\x00.", b"(dp0\nVa\np1\nI1\ns.", b"}q\x00X\x01\x00\x00\x00aq\x01K\x01s.", b"]q\x00."]
"""Of protocols 4, 0 and 1."""


@pytest.mark.parametrize(
    ("data", "said"),
    [*((data, "not a cost model file") for data in NOTHING), *((data, "a pickle") for data in PICKLES)],
)
def test_what_is_no_cost_model_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(CostModelError, match=f"the file is {said}"):
        decode_file(data, origin="the file")


def test_files_as_they_are_and_compressed(tmp_path: Path) -> None:
    path, content = tmp_path / "costs.json.gz", encode_file(gpt_file())
    (tmp_path / "costs.json").write_bytes(content)
    path.write_bytes(gzip.compress(content))
    plain, packed = (TableCostModel.load(tmp_path / name) for name in ("costs.json", "costs.json.gz"))
    assert packed.file == plain.file == gpt_file() and packed.digest == plain.digest
    for damaged in (b"{}", gzip.compress(b"{}")[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(CostModelError, match=r"cannot read the cost model .*json.gz: expected a whole gzip file"):
            read_file(path)
    with pytest.raises(CostModelError, match=r"cannot read the cost model .*absent.json.*\nhint: .*profile"):
        read_file(tmp_path / "absent.json")


def test_units_are_ms_and_mb() -> None:
    tables = TableCostModel.decode(encode_file(gpt_file())).tables(tensor_parallel=1, recompute=Recompute.NONE)
    rows = tables.at_sizes(tables.at_lengths(np.array([16]), np.array([0])), np.array([2]))[0]
    assert rows[0, Quantity.FORWARD] == 32_000_000  # ns
    assert rows[0, Quantity.STORED] == 64_000_000  # bytes
    assert tables.state.embedding_bytes == 4_000_000


def test_the_head_s_memory_may_be_left_out() -> None:
    """Of the published files; then it counts as nothing."""
    document = json.loads(json.dumps(GOOD))
    for quantity, value in (("stored_activation_mb", 5.0), ("peak_activation_mb", 8.0)):
        document["keys"]["tp1_none"][quantity]["postprocess"] = {"8": [[1, value], [2, value], [4, value]]}
    for given, expected in ((GOOD, [0, 0]), (document, [5_000_000, 8_000_000])):
        model = TableCostModel.decode(json.dumps(given).encode())
        values = model.tables(tensor_parallel=1, recompute=Recompute.NONE).values
        assert values[-1, [Quantity.STORED, Quantity.PEAK], 0, 0, 0].tolist() == expected
    del document["keys"]["tp1_none"]["peak_activation_mb"]["postprocess"]
    with pytest.raises(CostModelError, match=r"peak_activation_mb of \['encoder', 'postprocess'\], got \['encoder'\]"):
        TableCostModel.decode(json.dumps(document).encode())


def test_the_last_of_repeated_rows_counts() -> None:
    document = json.loads(json.dumps(GOOD))
    document["keys"]["tp1_none"]["time_ms"]["encoder.forward"]["8"].append([1, 9.5])
    tables = TableCostModel.decode(json.dumps(document).encode()).tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert tables.values[0, Quantity.FORWARD, 0, 0, 0] == 9_500_000


def test_a_hole_is_infeasible_around_it_and_nowhere_else() -> None:
    document = json.loads(json.dumps(GOOD))
    document["keys"]["tp1_none"]["time_ms"]["encoder.forward"]["32"].pop()  # size 4 × length 32
    model = TableCostModel.decode(json.dumps(document).encode())
    tables = model.tables(tensor_parallel=1, recompute=Recompute.NONE)

    def forward(size: int, length: int) -> int:
        grid_values = tables.at_lengths(np.array([length]), np.array([0]))
        return int(tables.at_sizes(grid_values, np.array([size]))[0, 0, Quantity.FORWARD])

    assert forward(4, 32) == forward(3, 32) == forward(4, 24) == forward(3, 24) == ABSENT
    assert forward(2, 32) == 64_000_000 and forward(4, 16) == 64_000_000
    assert forward(8, 16) == forward(1, 40) == ABSENT  # beyond the grid
    assert forward(1, 4) == forward(1, 8)  # below it: an upper bound
    assert forward(1, 12) == 12_000_000 and forward(1, 32) == 32_000_000  # on edges, also one that the hole ends


def test_a_combination_that_is_not_there_is_answered_with_those_that_are() -> None:
    model = TableCostModel.decode(encode_file(gpt_file()))
    with pytest.raises(CostModelError, match="no table for tensor parallelism 2 with recompute full; it has tp1_none"):
        model.tables(tensor_parallel=2, recompute=Recompute.FULL)


def test_the_encoder_s_output_may_be_left_out_and_a_decoder_only_model_has_none() -> None:
    document = json.loads(json.dumps(GOOD))
    document["keys"]["tp1_none"]["stored_activation_mb"]["encoder_output"] = {"8": [[1, 1.0]]}
    with pytest.raises(CostModelError, match=r"got \['encoder', 'encoder_output'\]"):
        TableCostModel.decode(json.dumps(document).encode())
    shape = ModelShape(family=ModelFamily.T5, hidden=32, heads=4, kv_channels=8, ffn=64, vocabulary=512)
    grid = AnalyticCostModel(shape, CPU_RATES, max_size=2, max_length=16).tables(
        tensor_parallel=1, recompute=Recompute.NONE
    )
    assert grid.values[grid.kinds.index(DECODER_ATTENTION), Quantity.ENTRY_STORED, -1, -1, 0] == 2 * 16 * 32 * 4


def test_packed_tables() -> None:
    tables = TableCostModel.decode(packed_file()).tables(tensor_parallel=1, recompute=Recompute.NONE)
    costs = packed_costs(tables, np.array([8, 4]), np.zeros(2, np.int64))
    assert costs is not None
    assert costs[0, Quantity.FORWARD] == 50_000_000 + 1_000_000 + 1_000_000
    assert costs[0, Quantity.PEAK] == 50_000_000 + 500_000 + 500_000
    assert costs[-1, Quantity.FORWARD] == 2_000_000
    for lengths in ([16, 16], [20]):  # a longer row than measured, a longer sample
        assert packed_costs(tables, np.array(lengths), np.zeros(len(lengths), np.int64)) is None
    assert decode_file(encode_file(decode_file(packed_file(), origin="x")), origin="x").keys["tp1_none"].packed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": np.array([3, 1])}, "sizes must increase"),
        ({"inputs": np.array([8, 2**21])}, "inputs must be at most"),
        ({"values": np.full((3, len(Quantity), 2, 2, 1), LARGEST_COST + 1)}, "costs must be at most"),
    ],
)
def test_tables_that_are_no_grid_are_refused(change: dict[str, Any], message: str) -> None:
    grid = {"sizes": np.array([1, 3]), "inputs": np.array([8, 24]), "targets": np.array([0])}
    good = grid | {"kinds": GPT_KINDS, "values": grid_values(GPT_KINDS, {}, 2, 2, 1), "state": STATE}
    CostTables(**good)
    with pytest.raises(CostModelError, match=message):
        CostTables(**(good | change))
