"""Graphs of forward passes that wait: gradients of what was received, whatever the stage does with it."""

import weakref

import pytest
import torch

from megatron_dynapipe.runtime import Entry, StageGraph

X = torch.tensor([-1.0, 2.0, 3.0])
WEIGHT = torch.tensor([4.0, 5.0, 6.0])


def run(function, received, gradients):
    """Gradients of what was received, when a stage that computes `function` is given those of what it sends."""
    entry = Entry([tensor.clone() for tensor in received])
    outputs = function(*entry.tensors)
    return StageGraph.to_outputs(entry, outputs).backward(gradients)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: [x * WEIGHT], WEIGHT),
        (lambda x: [x], torch.ones(3)),
        (lambda x: [x.relu_() * WEIGHT], torch.tensor([0.0, 5.0, 6.0])),
        (lambda x: [x * 2, x.exp().detach()], torch.full((3,), 2.0)),
        (lambda x: [torch.ones(3, requires_grad=True) * 2], torch.zeros(3)),
    ],
    ids=["used", "handed on", "changed in place", "partly detached", "unused"],
)
def test_gradients_of_one_tensor(function, expected):
    count = len(function(X.clone()))
    (gradient,) = run(function, [X], [torch.ones(3)] * count)
    assert torch.equal(gradient, expected)


def test_what_is_handed_on_adds_to_what_is_used():
    (gradient,) = run(lambda x: [x * WEIGHT, x], [X], [torch.ones(3), torch.full((3,), 0.5)])
    assert torch.equal(gradient, WEIGHT + 0.5)


def test_only_floating_tensors_get_gradients():
    ids = torch.tensor([0, 1, 2])
    gradients = run(lambda x, ids, y: [x[ids] * y], [X, ids, WEIGHT], [torch.ones(3)])
    assert [g.tolist() for g in gradients] == [WEIGHT.tolist(), X.tolist()]


@pytest.mark.parametrize("scale", [None, lambda loss: loss * 8])
def test_a_loss(scale):
    entry = Entry([X])
    (x,) = entry.tensors
    graph = StageGraph.to_loss(entry, (x * WEIGHT).sum())
    (gradient,) = graph.backward(scale=scale)
    assert torch.equal(gradient, WEIGHT * (1 if scale is None else 8))


def test_nothing_to_differentiate():
    entry = Entry([])
    assert StageGraph.to_loss(entry, torch.tensor(1.0)).backward() == ()
    with torch.no_grad():
        assert Entry([X]).tensors == [X]


def test_an_output_is_gone_once_it_is_dropped():
    entry = Entry([X.clone()])
    output = entry.tensors[0] + 1
    gone = weakref.ref(output)
    graph = StageGraph.to_outputs(entry, [output])
    del output
    assert gone() is None
    assert torch.equal(graph.backward([torch.ones(3)])[0], torch.ones(3))
