import msgspec
import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.instructions import format_stages
from megatron_dynapipe.store import codec
from tests.helpers.lists import parse_stages
from tests.helpers.plans import make_plan

PLAN = make_plan((2, 1), 2)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "iteration-7.plan"
    path.write_bytes(codec.encode(PLAN))
    return path


def test_verify_says_what_can_run_or_why_not(file, capsys):
    assert main(["verify", str(file)]) == 0
    assert capsys.readouterr().out == (
        f"{file}: iteration 7 can run: 6 samples in 3 micro-batches on 2 replicas of 2 stages, "
        f"digest {codec.digest(PLAN)}\n"
    )
    stage = PLAN.replicas[0].stages[0]
    without = msgspec.structs.replace(stage, instructions=stage.instructions[:-1])
    replica = msgspec.structs.replace(PLAN.replicas[0], stages=(without, PLAN.replicas[0].stages[1]))
    file.write_bytes(codec.encode(msgspec.structs.replace(PLAN, replicas=(replica, PLAN.replicas[1]))))
    assert main(["verify", str(file)]) == 1
    assert "iteration 7, replica 0: stage 0: the list ends with OUTPUT_GRAD" in capsys.readouterr().out
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["verify", str(file)]) == 1
    assert "the plan is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_missing_file_is_2(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "none.plan")]) == 2
    assert "none.plan: No such file or directory" in capsys.readouterr().err


def test_show_prints_a_plan_that_parses_back(file, capsys):
    assert main(["show", str(file), "--replica", "0"]) == 0
    text = capsys.readouterr().out
    assert "# micro-batch 1: padded shape 2x24, recompute none: samples 2,3" in text
    assert parse_stages(text) == tuple(stage.instructions for stage in PLAN.replicas[0].stages)
    assert main(["show", str(file)]) == 0
    both = capsys.readouterr().out
    assert format_stages(stage.instructions for stage in PLAN.replicas[1].stages) in both
    replica = PLAN.replicas[1]
    batches = (msgspec.structs.replace(replica.micro_batches[0], labels=(2, 7)),)
    file.write_bytes(
        codec.encode(msgspec.structs.replace(PLAN, replicas=(msgspec.structs.replace(replica, micro_batches=batches),)))
    )
    assert main(["show", str(file)]) == 0
    assert "tokens (input+target) 10+0,16+0; labels 2,7; at most" in capsys.readouterr().out


def test_show_draws_and_traces(file, tmp_path, capsys):
    picture, trace = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main(["show", str(file), "--picture", str(picture), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.split() == [str(picture), str(trace)]
    assert picture.stat().st_size > 1000 and trace.stat().st_size > 100
    assert main(["show", str(file), "--replica", "2"]) == 2
    assert "expected a replica from 0 to 1, got 2" in capsys.readouterr().err
    assert main(["show", str(file), "--picture", str(tmp_path / "plan.gif")]) == 2
    assert "expected a picture named .png or .svg" in capsys.readouterr().err
