"""Ranks whose flags differ do not train: one error, before costs are measured, names the flags, values and ranks.

One start of ranks tries all rows; each row is a whole start of the entry script, up to its refusal.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.supply.same_flags import ELSEWHERE, OWN, check_same_flags, comparable
from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.store.servers import free_port

STAGES = "--train-iters 2 --dynapipe-calibrate 20 --pipeline-model-parallel-size 2"
REPLICAS = "--train-iters 2 --dynapipe-calibrate 20"
ROWS = {
    "--lr 1e-2": "--lr 0.001 on rank 0 and 0.01 on rank 1",
    "--weight-decay 0.5": "--weight-decay 0.01 on rank 0 and 0.5 on rank 1",
    "--clip-grad 0.1": "--clip-grad 1.0 on rank 0 and 0.1 on rank 1",
    "--adam-beta1 0.5": "--adam-beta1 0.9 on rank 0 and 0.5 on rank 1",
    "--adam-eps 1e-3": "--adam-eps 1e-08 on rank 0 and 0.001 on rank 1",
    "--optimizer sgd": "--optimizer adam on rank 0 and sgd on rank 1",
    "--lr-decay-style linear": "--lr-decay-style constant on rank 0 and linear on rank 1",
    "--lr-warmup-iters 1": "--lr-warmup-iters 0 on rank 0 and 1 on rank 1",
    "--rotary-base 7": "--rotary-base 10000 on rank 0 and 7 on rank 1",
    "--rotary-percent 0.5": "--rotary-percent 1.0 on rank 0 and 0.5 on rank 1",
    "--norm-epsilon 0.1": "--layernorm-epsilon 1e-05 on rank 0 and 0.1 on rank 1",
    "--squared-relu": "--squared-relu not given on rank 0 and given on rank 1",
    "--dynapipe-activation gelu_tanh": "--dynapipe-activation not given on rank 0 and gelu_tanh on rank 1",
    "--dynapipe-softmax-scale 2": "--dynapipe-softmax-scale not given on rank 0 and 2.0 on rank 1",
    "--init-method-std 0.5": "--init-method-std 0.02 on rank 0 and 0.5 on rank 1",
    "--attention-output-gate": "--attention-output-gate not given on rank 0 and given on rank 1",
    "--dynapipe-truncate left": "--dynapipe-truncate not given on rank 0 and left on rank 1",
    "--bf16": "--bf16 not given on rank 0 and given on rank 1",
    "--log-interval 2": "--log-interval 1 on rank 0 and 2 on rank 1",
    "--seed 8": "--seed 7 on rank 0 and 8 on rank 1",
    "--train-iters 3": "--train-iters 2 on rank 0 and 3 on rank 1",
    "--save-interval 7": "--save-interval not given on rank 0 and 7 on rank 1",
    "--dynapipe-timeout-s 40": "--dynapipe-timeout-s 30.0 on rank 0 and 40.0 on rank 1",
    "--dynapipe-cost-model costs.json": "",  # ends where the file is opened, on that rank
    "--lr 1e-2 --clip-grad 2 --seed 3 --adam-beta2 0.5 --norm-epsilon 1 --weight-decay 1": "and 1 more",
}


def refused(*, rank: int, world_size: int, rows: list[list[str]]) -> list[dict[str, Any]]:
    """How each row ends on this rank: its status and what it says."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    ended = []
    for number, argv in enumerate(rows):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # the store's keys are those of a start
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = run_script(script_of("gpt"), argv)
        ended.append({"status": status, "stdout": output.getvalue(), "stderr": errors.getvalue()})
        destroy_global_vars()
        unset_num_microbatches_calculator()
    return ended


def on_other_ranks(*, rank: int, world_size: int, alike: list[str], others: list[list[str]]) -> list[dict[str, Any]]:
    """As `refused`, where the last rank alone has the words of a row."""
    own = others if rank == world_size - 1 else [[] for _ in others]
    return refused(rank=rank, world_size=world_size, rows=[[*alike, *more] for more in own])


@pytest.mark.parametrize(("layout", "half"), [(STAGES, 0), (REPLICAS, 1)], ids=["stages", "replicas"])
def test_a_flag_of_one_rank_is_refused_before_anything_is_measured(layout, half, data, tmp_path):
    rows = dict([*ROWS.items()][half::2])
    arguments = {
        "alike": words("gpt", data, layout, report=tmp_path / "report"),
        "others": [row.split() for row in rows],
    }
    first, other = run_ranks(on_other_ranks, 2, arguments, deadline_s=250)
    for (row, expected), rank_0, rank_1 in zip(rows.items(), first, other, strict=True):
        said = rank_0["stderr"] + rank_1["stderr"]
        assert (rank_0["status"], rank_1["status"]) == (2, 2), f"{row}: {said}"
        assert said.count("error: ") == 1 and "Traceback" not in said, f"{row}: {said}"
        if expected:
            assert "error: expected the same flags on all ranks, got " in rank_0["stderr"], row
        assert expected in said, row
        assert "measuring" not in rank_0["stdout"] and "initialize megatron" not in rank_0["stdout"], row
    assert not any((tmp_path / "report").glob("*.jsonl"))


def test_ranks_that_no_store_connects_are_refused_once_they_are_connected(data: Path, tmp_path: Path) -> None:
    arguments = {
        "alike": words("gpt", data, "--train-iters 2 --dynapipe-calibrate 0", report=tmp_path / "report"),
        "others": [["--lr", "1e-2"]],
    }
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    first, other = run_ranks(on_other_ranks, 2, arguments, environment=environment)
    assert (first[0]["status"], other[0]["status"]) == (2, 2)
    assert "expected the same flags on all ranks, got --lr 0.001 on rank 0 and 0.01" in first[0]["stderr"]


class FakeRanks:
    """What rank 0 sees of an exchange with others, whose fields are given."""

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows
        self.digests = [
            hashlib.blake2b(row, digest_size=16).hexdigest().encode() if row != b"{}" else b"" for row in rows
        ]

    def broadcast_text(self, text: str) -> str:
        return text

    def collect(self, data: bytes) -> list[bytes]:
        return [data, *(self.rows if data.startswith(b"{") else self.digests)]


def test_ranks_are_named_by_what_they_have() -> None:
    def ranks(*values: str) -> FakeRanks:
        return FakeRanks([json.dumps({"--lr": value}).encode() for value in values])

    with pytest.raises(ConfigError, match=r"got --lr 1 on 4 ranks \(0, 1, 4, …\) and 2 on ranks 2, 3, 5\n"):
        check_same_flags({"--lr": "1"}, ranks("1", "2", "2", "1", "2", "1"))
    with pytest.raises(ConfigError, match=r"--lr 1 on rank 0 and 2 on ranks 1-3\n"):
        check_same_flags({"--lr": "1"}, ranks("2", "2", "2"))
    with pytest.raises(ConfigError, match=r"--lr 1 on rank 0 and 2 on rank 2\n"):
        check_same_flags({"--lr": "1"}, FakeRanks([b"{}", b'{"--lr": "2"}']))
    check_same_flags({"--lr": "1"}, ranks("1"))
    check_same_flags({"--lr": "1"}, FakeRanks([b"{}"]))


def test_of_folders_only_whether_they_are_given_is_compared() -> None:
    args = argparse.Namespace(lr=1e-3, tensorboard_dir="there", add_bias_linear=False, local_rank=0, dynapipe_data=None)
    assert comparable(args) == {
        "--lr": "0.001",
        "--tensorboard-dir": "given",
        "--add-bias-linear": "not given",
        "--dynapipe-data": "not given",
    }


def test_what_may_differ_has_one_reason() -> None:
    assert not ELSEWHERE.keys() & OWN.keys()
    assert all(reason for reason in (*ELSEWHERE.values(), *OWN.values()))
