import re

import pytest

from megatron_dynapipe.core import instructions as ins
from tests.helpers.lists import parse_instruction, parse_stages
from tests.helpers.plans import make_plan

A, G = ins.Payload.ACTIVATION, ins.Payload.GRADIENT

WORDS = {
    "LOAD3": ins.Load(3),
    "F3": ins.Forward(3),
    "F3.1": ins.Forward(3, 1),
    "B12": ins.Backward(12),
    "B0.2": ins.Backward(0, 2),
    "BI3": ins.BackwardInput(3),
    "BW12.1": ins.BackwardWeight(12, 1),
    "SEND_F3>1[64x8x128]": ins.SendStart(A, 3, 0, 1, ((64, 8, 128),)),
    "SEND_B3.1>0[64x8x128,16x8x128]": ins.SendStart(G, 3, 1, 0, ((64, 8, 128), (16, 8, 128))),
    "WAIT_SEND_F3>1": ins.SendWait(A, 3, 0, 1),
    "RECV_F3<0[64x8x128]": ins.RecvStart(A, 3, 0, 0, ((64, 8, 128),)),
    "RECV_B3<2[]": ins.RecvStart(G, 3, 0, 2, ()),
    "WAIT_RECV_B3.1<2": ins.RecvWait(G, 3, 1, 2),
    "FREE_DATA3": ins.Free(ins.Buffer.DATA, 3),
    "FREE_OUTPUT_GRAD3.1": ins.Free(ins.Buffer.OUTPUT_GRAD, 3, 1),
}


@pytest.mark.parametrize("word", WORDS)
def test_every_instruction_has_one_word_that_parses_back(word):
    assert ins.format_instruction(WORDS[word]) == word
    assert parse_instruction(word) == WORDS[word]


def test_a_pipeline_is_one_line_per_stage_and_parses_back():
    lists = tuple(stage.instructions for stage in make_plan((3,), 3).replicas[0].stages)
    text = ins.format_stages(lists)
    assert [line.partition(":")[0] for line in text.splitlines()] == ["stage 0", "stage 1", "stage 2"]
    assert parse_stages(text) == lists


def test_an_error_points_at_its_instruction():
    steps = [ins.Forward(i) for i in range(10)]
    assert ins.point_at(steps, 5, around=2) == "… F3 F4 --> F5 <-- F6 F7 …"
    assert ins.point_at(steps, 0, around=1) == "--> F0 <-- F1 …"
    assert ins.point_at(steps, 9, around=1) == "… F8 --> F9 <--"


def test_channels_are_told_apart_by_payload_direction_and_wrap():
    assert ins.channel_of(A, 0, 1, 2) != ins.channel_of(A, 1, 0, 2)
    assert ins.channel_of(A, 1, 0, 2).wraps and not ins.channel_of(G, 1, 0, 2).wraps
    with pytest.raises(ValueError, match=re.escape("no channel carries ACTIVATION from stage 2 to 1 of 4")):
        ins.channel_of(A, 2, 1, 4)
