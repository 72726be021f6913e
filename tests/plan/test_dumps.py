import msgspec
import pytest

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.plan.dumps import dump_path, dump_paths, dump_plan, read_dump
from tests.helpers.plans import make_plan

PLAN = make_plan((2, 1), 2)


def test_plans_are_read_back_in_the_order_of_iterations(tmp_path):
    made = [msgspec.structs.replace(PLAN, iteration=iteration) for iteration in (1_000_000, 2, 10)]
    written = [dump_plan(tmp_path, "train", plan) for plan in made]
    assert written == [dump_path(tmp_path, "train", plan.iteration) for plan in made]
    (tmp_path / "train" / ".iteration-000003.plan.77").write_bytes(b"a planner that was killed")
    assert [read_dump(path) for path in dump_paths(tmp_path)] == [made[1], made[2], made[0]]
    assert dump_paths(tmp_path, "valid") == []


def test_a_plan_is_replaced_by_the_same(tmp_path):
    assert dump_plan(tmp_path, "train", PLAN) == dump_plan(tmp_path, "train", PLAN)
    assert len(list((tmp_path / "train").iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"DYNAPL", b"\x80\x04pickle"])
def test_a_damaged_file_is_named(tmp_path, content):
    path = dump_plan(tmp_path, "train", PLAN)
    path.write_bytes(content)
    with pytest.raises(DataError, match=path.name):
        read_dump(path)
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        read_dump(path)
