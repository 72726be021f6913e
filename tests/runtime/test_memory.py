"""Counting what operations leave alive on the CPU, by hand."""

import torch

from megatron_dynapipe.runtime.memory import LiveStorages, pass_memory

KB = torch.float32.itemsize * 256


def test_storages_count_while_they_live() -> None:
    outside = torch.ones(256)
    with LiveStorages() as live:
        one = outside + 1
        two = one * 2
        view = two[:10]
        assert live.bytes == 2 * KB
        del one, two
        assert live.bytes == KB  # the view keeps its base
        view.add_(1)  # makes nothing
        assert live.bytes == KB
    del view
    assert live.bytes == 0 and live.peak_bytes == 2 * KB


def test_what_a_layer_keeps_for_its_backward() -> None:
    weight, state = torch.ones(256, 256, requires_grad=True), torch.ones(8, 256, requires_grad=True)
    row = 8 * KB  # one activation of [8, 256]

    def forward() -> torch.Tensor:
        return torch.tanh(state @ weight).exp()  # keeps tanh's output and exp's, which is the layer's own

    memory = pass_memory(forward, lambda output: output.backward(torch.ones_like(output)), torch.device("cpu"))
    assert memory.stored_bytes == 2 * row
    assert memory.peak_bytes >= 256 * KB + 2 * row  # the weight's gradient is made while they are kept


def test_recomputation_keeps_less_and_peaks_in_the_backward() -> None:
    state = torch.ones(8, 256, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x)
        return x

    def backward(output: torch.Tensor) -> None:
        output.backward(torch.ones_like(output))

    kept = pass_memory(lambda: layer(state), backward, torch.device("cpu"))

    def recomputed() -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, state, use_reentrant=True)
        return result

    full = pass_memory(recomputed, backward, torch.device("cpu"))
    assert full.stored_bytes == 8 * KB < kept.stored_bytes == 6 * 8 * KB
    assert full.peak_bytes > 6 * 8 * KB
