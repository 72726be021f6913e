"""Passes are spans where Megatron's own are; nemo-lens, which makes them, is faked where it would be imported."""

from tests.helpers.layouts.layout import Layout, on_ranks

FORWARD, BACKWARD = "megatron.microbatch.forward", "megatron.microbatch.backward"


def test_every_pass_runs_inside_a_span():
    for ran, begun in on_ranks("probes.spans", Layout(stages=2, divided=2)):
        micro_batches = {attributes["micro_batch"] for _, _, attributes in begun}
        assert {(group, name) for group, name, _ in begun} == {("microbatch", FORWARD), ("microbatch", BACKWARD)}
        forwards = sum(name == FORWARD for _, name, _ in begun)
        assert forwards == len(micro_batches) > 1
        assert len(begun) - forwards == len(micro_batches) + (len(micro_batches) + 1) // 2, "halves are spans, too"
        assert set(ran) == {FORWARD, BACKWARD}, "forward and backward of a layer run inside"
