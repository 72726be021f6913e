from collections import defaultdict
from typing import get_args

import pytest

from megatron_dynapipe.core import instructions as ins
from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.core.native import agree

ABSENT, READY, MOVING, USED, FREED = (ins.State[name] for name in ("ABSENT", "READY", "MOVING", "USED", "FREED"))
TRANSFERS = (ins.SendStart, ins.SendWait, ins.RecvStart, ins.RecvWait)


def test_the_table_has_every_instruction_and_a_word_of_its_own_for_each() -> None:
    assert set(ins.EFFECTS) == set(get_args(ins.Instruction))
    assert len({effect.word for effect in ins.EFFECTS.values()}) == len(ins.EFFECTS)
    assert set(ins.FORWARD_ONLY_EFFECTS) == {ins.Load, ins.Forward, ins.Free, *TRANSFERS}


def moves(effects, *, without: tuple[type, ...] = ()) -> dict[object, set[tuple[ins.State, ins.State]]]:
    """By buffer, and "graph", the moves that some instruction makes."""
    found = defaultdict(set)
    for kind, effect in effects.items():
        if kind in without:
            continue
        for buffer, move in effect.buffers.items():
            found[buffer].add(move)
        for buffer in effect.carries.values() or (ins.Buffer if effect.named else ()):
            found[buffer].add(effect.named)
        if effect.graph is not None:
            found["graph"].add(effect.graph)
    return found


@pytest.mark.parametrize("without", [(ins.BackwardInput, ins.BackwardWeight), (ins.Backward,)])
def test_every_buffer_of_a_training_plan_has_one_way_from_absent_to_freed(without: tuple[type, ...]) -> None:
    for buffer, of_buffer in moves(ins.EFFECTS, without=without).items():
        assert (
            way(of_buffer)
            == {
                ins.Buffer.DATA: [READY, USED, FREED],
                ins.Buffer.INPUT: [MOVING, READY, USED, FREED],
                ins.Buffer.OUTPUT_GRAD: [MOVING, READY, USED, FREED],
                ins.Buffer.OUTPUT: [READY, MOVING, USED, FREED],
                ins.Buffer.INPUT_GRAD: [READY, MOVING, USED, FREED],
                "graph": [READY, FREED] if ins.Backward not in without else [READY, USED, FREED],
            }[buffer]
        )


def test_a_forward_only_plan_keeps_no_graph_and_its_forwards_use_their_input_up() -> None:
    found = moves(ins.FORWARD_ONLY_EFFECTS)
    assert way(found["graph"]) == [FREED]
    assert way(found[ins.Buffer.INPUT]) == [MOVING, READY, USED, FREED]


def way(of_buffer: set[tuple[ins.State, ins.State]]) -> list[ins.State]:
    """The states after ABSENT, by moves of which one leaves each state."""
    following = {before: after for before, after in of_buffer if before != after}
    assert len(following) == sum(before != after for before, after in of_buffer)
    states = [following[ABSENT]]
    while states[-1] in following:
        states.append(following[states[-1]])
    return states


def test_a_core_that_reads_records_of_other_fields_is_refused() -> None:
    """Such a core took every list for a wrong one, and each was verified again, slowly, without a word."""
    fields = {kind.__name__: 1 + len(kind.__struct_fields__) for kind in ins.EFFECTS}
    agree("InstructionFields", fields)
    with pytest.raises(InstallationError, match="expected a native core in which InstructionFields is"):
        agree("InstructionFields", fields | {"Forward": 4})
