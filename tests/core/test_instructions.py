from collections import defaultdict
from typing import get_args

import pytest

from megatron_dynapipe.core.errors import InstallationError
from megatron_dynapipe.core.instructions import (
    EFFECTS,
    FORWARD_ONLY_EFFECTS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Free,
    Instruction,
    Load,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    State,
)
from megatron_dynapipe.core.native import agree

ABSENT, READY, MOVING, USED, FREED = (State[name] for name in ("ABSENT", "READY", "MOVING", "USED", "FREED"))
TRANSFERS = (SendStart, SendWait, RecvStart, RecvWait)


def test_the_table_has_every_instruction_and_a_word_of_its_own_for_each() -> None:
    assert set(EFFECTS) == set(get_args(Instruction))
    assert len({effect.word for effect in EFFECTS.values()}) == len(EFFECTS)
    assert set(FORWARD_ONLY_EFFECTS) == {Load, Forward, Free, *TRANSFERS}


def moves(effects, *, without: tuple[type, ...] = ()) -> dict[object, set[tuple[State, State]]]:
    """By buffer, and "graph", the moves that some instruction makes."""
    found = defaultdict(set)
    for kind, effect in effects.items():
        if kind in without:
            continue
        for buffer, move in effect.buffers.items():
            found[buffer].add(move)
        for buffer in effect.carries.values() or (Buffer if effect.named else ()):
            found[buffer].add(effect.named)
        if effect.graph is not None:
            found["graph"].add(effect.graph)
    return found


@pytest.mark.parametrize("without", [(BackwardInput, BackwardWeight), (Backward,)])
def test_every_buffer_of_a_training_plan_has_one_way_from_absent_to_freed(without: tuple[type, ...]) -> None:
    for buffer, of_buffer in moves(EFFECTS, without=without).items():
        assert (
            way(of_buffer)
            == {
                Buffer.DATA: [READY, USED, FREED],
                Buffer.INPUT: [MOVING, READY, USED, FREED],
                Buffer.OUTPUT_GRAD: [MOVING, READY, USED, FREED],
                Buffer.OUTPUT: [READY, MOVING, USED, FREED],
                Buffer.INPUT_GRAD: [READY, MOVING, USED, FREED],
                "graph": [READY, FREED] if Backward not in without else [READY, USED, FREED],
            }[buffer]
        )


def test_a_forward_only_plan_keeps_no_graph_and_its_forwards_use_their_input_up() -> None:
    found = moves(FORWARD_ONLY_EFFECTS)
    assert way(found["graph"]) == [FREED]
    assert way(found[Buffer.INPUT]) == [MOVING, READY, USED, FREED]


def way(of_buffer: set[tuple[State, State]]) -> list[State]:
    """The states after ABSENT, by moves of which one leaves each state."""
    following = {before: after for before, after in of_buffer if before != after}
    assert len(following) == sum(before != after for before, after in of_buffer)
    states = [following[ABSENT]]
    while states[-1] in following:
        states.append(following[states[-1]])
    return states


def test_a_core_that_reads_records_of_other_fields_is_refused() -> None:
    """Such a core took every list for a wrong one, and each was verified again, slowly, without a word."""
    fields = {kind.__name__: 1 + len(kind.__struct_fields__) for kind in EFFECTS}
    agree("InstructionFields", fields)
    with pytest.raises(InstallationError, match="expected a native core in which InstructionFields is"):
        agree("InstructionFields", fields | {"Forward": 4})
