"""Before its first iteration a rank reads its run file and costs once, and builds Megatron's parser and global
variables, and its configuration, once, also where its virtual stages are chosen.
"""

import re
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest

from megatron_dynapipe.costing.format import encode_file
from tests.costing import models
from tests.helpers.entry_scripts import run_entry, words
from tests.helpers.processes import run_ranks


def run_counted(*, rank: int, world_size: int, argv: list[str], paths: list[str]) -> dict[str, object]:
    """On a forked rank: a run, how often it opened each of the paths, built Megatron's parser, set its variables and
    made its configuration.
    """
    from megatron.training import arguments

    from megatron_dynapipe.megatron.flags import from_megatron

    counted, build, set_all = Counter[str](), arguments.add_megatron_arguments, arguments.set_global_variables
    configure = from_megatron.run_config

    def count_open(event: str, details: tuple) -> None:
        if event == "open" and str(details[0]) in paths:
            counted[Path(details[0]).name] += 1

    def count_parser(parser):
        callers = {frame.name for frame in traceback.extract_stack()}
        counted["parser"] += "pretrain" not in callers  # where Megatron builds one more, for its fault tolerance
        return build(parser)

    def count_variables(args):
        counted["variables"] += 1
        set_all(args)

    def count_configurations(*given, **named):
        counted["configurations"] += 1
        return configure(*given, **named)

    sys.addaudithook(count_open)
    arguments.add_megatron_arguments = count_parser
    arguments.set_global_variables = count_variables
    from_megatron.run_config = count_configurations
    run = run_entry(
        rank=rank, world_size=world_size, script="pretrain_gpt_multitask.py", argv=argv, kill=None, pictures=False
    )
    return run | {"counted": dict(counted)}


@pytest.mark.parametrize("elastic", ["", "--dynapipe-elastic --save saved --save-interval 100"], ids=["", "elastic"])
def test_files_are_read_and_the_parser_is_built_once(data, tmp_path, monkeypatch, elastic):
    costs, file = tmp_path / "costs.json", tmp_path / "run.yaml"
    monkeypatch.setattr(models, "LENGTHS", (8, 32, 128))
    costs.write_bytes(encode_file(models.gpt_file(scale=1e-3)))
    file.write_text(f"train-iters: 1\ndynapipe-cost-model: {costs}\ndynapipe-limit-rc-type: none\n")
    flags = f"--dynapipe-config {file} --dynapipe-layout padded {elastic.replace('saved', str(tmp_path))}"
    argv = words("gpt", data, flags, report=tmp_path / "report")
    arguments = {"argv": argv, "paths": [str(costs), str(file)]}
    (run,) = run_ranks(run_counted, 1, arguments, deadline_s=120)
    assert run["status"] == 0, run["stderr"][-3000:]
    assert list(run["losses"]) == ["1"]
    read = {"costs.json": 1, "run.yaml": 1, "parser": 1, "variables": 1}
    # A run of one rank is configured, too, by which the layout is chosen.
    assert run["counted"] == read | {"configurations": 2 if elastic else 1}


def test_choosing_virtual_stages_parses_nothing_again(data, tmp_path):
    flags = "--pipeline-model-parallel-size 2 --num-layers 5 --dynapipe-layers-per-stage auto --train-iters 1"
    flags += " --dynapipe-timeout-s 100"  # rank 1 waits while rank 0 chooses
    argv = words("gpt", data, flags, report=tmp_path / "report")
    runs = run_ranks(run_counted, 2, {"argv": argv, "paths": []}, deadline_s=250)
    assert [run["status"] for run in runs] == [0, 0], runs[0]["stderr"][-3000:]
    (layers,) = re.findall(r"layers per stage: (\S+)", runs[0]["stdout"])
    assert layers.count(",") > 1, "several virtual stages on each rank are faster"
    assert [run["counted"] for run in runs] == [{"parser": 1, "variables": 1, "configurations": 1}] * 2
    assert list(runs[-1]["losses"]) == ["1"]
