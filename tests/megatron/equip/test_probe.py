"""What a probe finds in built layers, and what it does not find."""

from tests.helpers.processes import in_ranks


@in_ranks(1)
def test_layers_are_given_what_they_can_take():
    import torch

    from megatron_dynapipe.megatron.equip.equipped import equip
    from megatron_dynapipe.megatron.equip.probe import lacking
    from megatron_dynapipe.megatron.equip.subclass import become
    from tests.helpers.layouts.layout import Layout
    from tests.helpers.layouts.model import build, start

    class Scaling:
        """Scales queries by their place, as Ministral's core attention does."""

        def forward(self, query, *rest, **keywords):
            places = torch.floor(torch.arange(len(query)) / 4.0).view(-1, 1, 1, 1)
            return super().forward(query * (1 + 0.3 * torch.log(1 + places)), *rest, **keywords)

    class Recurrent:
        """Carries a sum from position to position, as a state-space mixer does."""

        def forward(self, states, *rest, **keywords):
            output, bias = super().forward(states, *rest, **keywords)
            return output + 0.1 * states.cumsum(0), bias

    layout = Layout(attention="megatron", positions="rope")
    start(layout, None)

    def found(change):
        (model,) = build(layout, None)
        change(model)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        names = list(model.state_dict())
        said = lacking([model], equip([model]))
        assert list(model.state_dict()) == names
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        assert model.training
        return said

    def scales(model):
        for layer in model.decoder.layers:
            become(layer.self_attention.core_attention, Scaling)

    assert found(lambda model: None) == ("", "")
    packed, pieces = found(scales)
    assert packed == ""
    assert pieces.startswith("DotProductAttention counts a piece's positions anew")
    packed, pieces = found(lambda model: become(model.decoder.layers[0].mlp, Recurrent))
    assert packed.startswith("TransformerLayer mixes samples of a row") and pieces == packed
