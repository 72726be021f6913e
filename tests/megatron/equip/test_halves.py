"""Splits of modules as layouts of Megatron, and back."""

import pytest

from megatron_dynapipe.costing.pattern import megatron_layout
from tests.helpers.processes import in_ranks

SPLITS = {
    (5, 3): "Ett,|ttL",
    (4, 4): "Ett|ttL",
    (3, 2, 1, 2): "Et,|t,|t|tL",
    (1, 6, 1): "E,|ttt,|tL",
}


@pytest.mark.parametrize(("modules", "text"), SPLITS.items())
def test_a_comma_stands_for_half_a_layer(modules, text):
    from megatron_dynapipe.megatron.equip.halves import modules_of_text

    assert megatron_layout(tuple(count / 2 for count in modules)) == text
    assert modules_of_text(text) == modules


def test_layouts_of_others_are_read():
    from megatron_dynapipe.megatron.equip.halves import modules_of_text

    assert modules_of_text("Et*3|(tt|)*2,L") == (6, 4, 4, 0)


@in_ranks(1)
def test_neighbours_build_the_layer_between_them():
    from megatron.core import parallel_state

    from megatron_dynapipe.megatron.equip.halves import OverlappingLayout
    from tests.megatron.models.attention_ranks import start

    start()
    layout = OverlappingLayout((3, 2, 1, 2), 2)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    built = [layout.get_layer_id_list(vp_stage=chunk, pp_rank=stage) for chunk in (0, 1) for stage in (0, 1)]
    assert built == [[0, 1], [1, 2], [2], [3]]
    assert layout.validate_layer_layout(4, None) is False
