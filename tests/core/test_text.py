import re

import pytest

from megatron_dynapipe.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Free,
    Load,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
    SendWait,
    channel_of,
    format_instruction,
    format_stages,
    point_at,
)
from tests.helpers.lists import parse_instruction, parse_stages
from tests.helpers.plans import make_plan

A, G = Payload.ACTIVATION, Payload.GRADIENT

WORDS = {
    "LOAD3": Load(3),
    "F3": Forward(3),
    "F3.1": Forward(3, 1),
    "B12": Backward(12),
    "B0.2": Backward(0, 2),
    "BI3": BackwardInput(3),
    "BW12.1": BackwardWeight(12, 1),
    "SEND_F3>1[64x8x128]": SendStart(A, 3, 0, 1, ((64, 8, 128),)),
    "SEND_B3.1>0[64x8x128,16x8x128]": SendStart(G, 3, 1, 0, ((64, 8, 128), (16, 8, 128))),
    "WAIT_SEND_F3>1": SendWait(A, 3, 0, 1),
    "RECV_F3<0[64x8x128]": RecvStart(A, 3, 0, 0, ((64, 8, 128),)),
    "RECV_B3<2[]": RecvStart(G, 3, 0, 2, ()),
    "WAIT_RECV_B3.1<2": RecvWait(G, 3, 1, 2),
    "FREE_DATA3": Free(Buffer.DATA, 3),
    "FREE_OUTPUT_GRAD3.1": Free(Buffer.OUTPUT_GRAD, 3, 1),
}


@pytest.mark.parametrize("word", WORDS)
def test_every_instruction_has_one_word_that_parses_back(word):
    assert format_instruction(WORDS[word]) == word
    assert parse_instruction(word) == WORDS[word]


def test_a_pipeline_is_one_line_per_stage_and_parses_back():
    lists = tuple(stage.instructions for stage in make_plan((3,), 3).replicas[0].stages)
    text = format_stages(lists)
    assert [line.partition(":")[0] for line in text.splitlines()] == ["stage 0", "stage 1", "stage 2"]
    assert parse_stages(text) == lists


def test_an_error_points_at_its_instruction():
    steps = [Forward(i) for i in range(10)]
    assert point_at(steps, 5, around=2) == "… F3 F4 --> F5 <-- F6 F7 …"
    assert point_at(steps, 0, around=1) == "--> F0 <-- F1 …"
    assert point_at(steps, 9, around=1) == "… F8 --> F9 <--"


def test_channels_are_told_apart_by_payload_direction_and_wrap():
    assert channel_of(A, 0, 1, 2) != channel_of(A, 1, 0, 2)
    assert channel_of(A, 1, 0, 2).wraps and not channel_of(G, 1, 0, 2).wraps
    with pytest.raises(ValueError, match=re.escape("no channel carries ACTIVATION from stage 2 to 1 of 4")):
        channel_of(A, 2, 1, 4)
