"""What stands between modules, written down and divided; what cannot be followed, refused with its place."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.modules.program import SplitTrace
from megatron_dynapipe.modules.trace import CutPoint, cut_points, resolve_split_points, trace
from tests.modules.models import SMALL, of_transformers, quiet

HOST = torch.device("cpu")


class Steps(nn.Module):
    """Linear layers with cuts between them; `between` is code that runs in the middle."""

    def __init__(self, between=lambda x, first: x, cuts=2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(cuts + 1)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(cuts)])
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.between = between

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        first = x = self.layers[0](x) * factor
        for cut, layer in zip(self.cuts, list(self.layers)[1:], strict=True):
            x = cut(x)
            x = layer(self.between(x, first))
        return x * self.scale


def run_divided(model: nn.Module, example: dict, batch: dict) -> tuple[torch.Tensor, SplitTrace]:
    """The model's stages one after another, on a batch of other sizes than the example's."""
    traced = trace(model, example, cut_points(model))
    division = SplitTrace(traced, list(range(len(traced.points) + 1)))
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    symbols = traced.domain.bind(shapes)
    assert symbols is not None
    received = ()
    for stage in range(division.stages):
        function = division.compile(stage, model.get_submodule)
        sizes = traced.domain.evaluator(traced.sizes)(symbols)
        received = function.run(received, batch, sizes, HOST)
        if stage < division.stages - 1:
            assert [tensor.shape for tensor in received] == [m.shape for m in division.boundary_after(stage)(symbols)]
    return received, division


class TwoSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def in_place(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[:, 0] = 0.0
    return x.add_(first)


BETWEEN = {
    "nothing": lambda x, first: x,
    "a skip over stages": lambda x, first: x + first,
    "sizes": lambda x, first: x.view(x.shape[0] * x.shape[1] // 2, -1).view(x.shape) + x.shape[1] / 7,
    "a branch on sizes": lambda x, first: x + 1 if x.shape[0] > 1 else x - 1,
    "constants and dtypes": lambda x, first: torch.cat([x, first.to(torch.float64).to(x.dtype)], dim=-1)[..., 2:6],
    "made from nothing": lambda x, first: x + torch.arange(x.shape[-1], device=x.device),
    "in place": in_place,
    "no gradient": lambda x, first: x + _frozen(first),
    "several results": lambda x, first: (
        torch.stack(x.split(1, dim=-1)[::-1], dim=-1).squeeze(-2).contiguous() + x.max(-1)[0][..., None]
    ),
}


class Structured(nn.Module):
    """Across its cuts: a tuple; a dict with constants and sizes; a tensor and a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Takes(), Takes(), Takes()
        self.cuts = nn.ModuleList([CutPoint() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        pair = self.cuts[0]((self.first({"x": x, "scale": 2.0, "rows": x.shape[0], "name": None}), x))
        y, x = pair
        z = self.second(self.cuts[1]({"x": y, "scale": 0.5, "rows": (y.shape[1], [x]), "name": "word"}))
        z, box = self.cuts[2](z, Pair(y, 3))
        third = self.third({"x": z, "scale": box.factor, "rows": 1, "name": "x"})
        return {"z": third, "first": box.tensor, "more": [1, x]}


class Takes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        assert isinstance(given["scale"], int | float)
        rows = given["rows"]
        if isinstance(rows, tuple):
            rows = rows[0] + rows[1][0].shape[0]
        return super().forward(given["x"]) * given["scale"] + rows


class Pair(NamedTuple):
    tensor: torch.Tensor
    factor: int


def test_tuples_dicts_and_constants_cross_a_cut():
    model = Structured()
    batch = {"x": torch.randn(5, 8, 4)}
    output, division = run_divided(model, {"x": torch.randn(3, 6, 4)}, batch)
    expected = model(**batch)
    assert torch.equal(output["z"], expected["z"]) and torch.equal(output["first"], expected["first"])
    assert output["more"][0] == 1 and torch.equal(output["more"][1], batch["x"])
    # The batch's own tensor crosses no boundary: every stage has the batch.
    assert [len(tensors) for tensors in division.boundaries] == [1, 1, 2]


def _frozen(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_stands_between_modules_runs_as_it_was_written(between):
    model = Steps(between)
    example, batch = {"x": torch.randn(3, 6, 4)}, {"x": torch.randn(5, 8, 4)}
    output, _ = run_divided(model, example, batch)
    expected = model(**batch)
    assert torch.equal(output, expected)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected.sum(), parameters, allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other)


class LoopOverExperts(nn.Module):
    """A block whose control flow depends on values: experts see the rows that were chosen for them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero((x.sum(-1) > 0) == bool(number), as_tuple=True)
            if len(rows[0]):
                output = output.index_put(rows, expert(x[rows]))
        return output


BLOCKS = {
    "control flow of its own": lambda layer: nn.Sequential(LoopOverExperts(), layer),
    "compiled": lambda layer: torch.compile(layer, backend="eager"),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_is_a_whole_module_whatever_it_does(block):
    model = Steps()
    model.layers[1] = block(model.layers[1])
    output, _ = run_divided(model, {"x": torch.randn(3, 6, 4)}, batch := {"x": torch.randn(5, 8, 4)})
    assert torch.equal(output, model(**batch))


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_mixtures_of_experts_of_transformers(experts: str):
    quiet()
    sizes = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8}
    sizes["num_experts_per_tok"] = 2
    model = of_transformers("Qwen3Moe", "ForCausalLM", **sizes)()
    model.set_experts_implementation(experts)
    batch = {"input_ids": torch.randint(0, 64, (3, 10))}
    assert len(trace(model, batch, resolve_split_points(model, ["layers.2"])).points) == 1


def test_a_value_that_skips_stages_crosses_every_boundary_in_between():
    _, plain = run_divided(Steps(BETWEEN["nothing"]), {"x": torch.randn(3, 4)}, {"x": torch.randn(2, 4)})
    _, skip = run_divided(Steps(BETWEEN["a skip over stages"]), {"x": torch.randn(3, 4)}, {"x": torch.randn(2, 4)})
    assert [len(each) for each in plain.boundaries] == [1, 1]
    # At the first boundary the two are one tensor.
    assert [len(each) for each in skip.boundaries] == [1, 2]


def test_what_follows_from_the_batch_alone_crosses_no_boundary():
    class Masked(Steps):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            wide = mask[:, None].float().expand(-1, x.shape[1]).unsqueeze(-1)
            for cut, layer in zip(self.cuts, self.layers, strict=False):
                x = cut(layer(x) * wide)
            return self.layers[-1](x) * wide

    batch = {"x": torch.randn(3, 5, 4), "mask": torch.tensor([1, 0, 1])}
    model = Masked()
    output, division = run_divided(model, batch, batch)
    assert torch.equal(output, model(**batch))
    assert [len(each) for each in division.boundaries] == [1, 1]
    assert [division.batch_keys(stage) for stage in range(3)] == [["x", "mask"], ["mask"], ["mask"]]


def test_a_trace_holds_for_other_sizes_until_control_flow_says_otherwise():
    model = Steps(BETWEEN["a branch on sizes"])
    domain = trace(model, {"x": torch.randn(3, 4)}, cut_points(model)).domain
    assert domain.bind({"x": (7, 4)}) == (7, 4)
    assert domain.bind({"x": (1, 4)}) is None, "a size of one is another trace's"
    assert domain.bind({"x": (7, 5)}) is None
    assert domain.bind({"x": (7, 4, 4)}) is None
    assert domain.bind({"y": (7, 4)}) is None


def test_a_trace_neither_reads_nor_changes_the_model():
    model = Steps()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    meta = {name: nn.Parameter(value.to("meta")) for name, value in model.named_parameters()}
    trace(model, {"x": torch.randn(3, 4)}, cut_points(model))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, value in meta.items():
        holder, _, last = name.rpartition(".")
        setattr(model.get_submodule(holder), last, value)
    assert len(trace(model, {"x": torch.randn(3, 4)}, cut_points(model)).points) == 2


def leaky(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return Leak.kept


class Leak(nn.Linear):
    kept: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Leak.kept = super().forward(x)
        return x


REFUSED = {
    "a branch on data": (lambda x, first: x if x.sum() > 0 else first, "x.sum\\(\\) > 0"),
    "a number from data": (lambda x, first: x * x.mean().item(), "x.mean\\(\\).item\\(\\)"),
    "sizes from data": (lambda x, first: x[x[:, 0] > 0], "x\\[x\\[:, 0\\] > 0\\]"),
    "an autograd function": (lambda x, first: TwoSums.apply(x), "TwoSums"),
    "an object with tensors": (None, "holds tensors"),
    "a value from inside": (leaky, "without having been returned"),
}


@pytest.mark.parametrize(("between", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_place(between, said):
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class TakesBox(nn.Linear):
        def forward(self, box: Box) -> torch.Tensor:
            return super().forward(box.value)

    model = Steps(between or (lambda x, first: Box(x)))
    if between is None:
        model.layers[1] = TakesBox(4, 4)
    if between is leaky:
        model.layers[0] = Leak(4, 4)
    with pytest.raises(ConfigError, match=said) as raised:
        trace(model, {"x": torch.randn(3, 4)}, cut_points(model))
    assert "test_trace.py:" in str(raised.value)


class Changing(Steps):
    """A model whose forward, between its modules, changes what the model holds."""

    def __init__(self, change) -> None:
        super().__init__(lambda x, first: (change(self), x)[1])
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.log, self.counts = 0, [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.seen + self.mean)


class Updated(nn.Module):
    """Changes a buffer that it is given, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0
        self.counted = 1

    def forward(self, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            buffer.add_(1)
        self.counted += 1


UPDATED = Updated()
CHANGES = {
    "a buffer": (lambda model: model.seen.add_(1), "seen is changed in place between modules"),
    "a buffer's data": (lambda model: model.seen.data.add_(1), "seen is changed in place"),
    "an entry": (lambda model: model.mean.__setitem__(0, 1.0), "mean is changed in place"),
    "a view": (lambda model: model.mean[1:].mul_(2), "mean is changed in place"),
    "an output": (lambda model: torch.add(model.mean, 1, out=model.mean), "mean is changed in place"),
    "many at once": (lambda model: torch._foreach_add_([model.mean], 1), "mean is changed in place"),
    "statistics": (
        lambda model: F.batch_norm(torch.ones(3, 4), model.mean, torch.ones(4), training=True),
        "mean is changed in place",
    ),
    "a weight": (lambda model: model.scale.detach().clamp_(max=1), "scale is changed in place"),
    "a module's argument": (lambda model: UPDATED(model.seen), "seen is changed in place"),
    "a global module": (lambda model: UPDATED(None), "changes the attribute counted of a global Updated"),
    "another buffer": (lambda model: setattr(model, "seen", model.seen + 1), "changes the attribute seen"),
    "a counter": (lambda model: setattr(model, "calls", model.calls + 1), "changes the attribute calls"),
    "a list": (lambda model: model.log.append(1), "changes the attribute log, which it reads at .*test_trace"),
    "a dict": (lambda model: model.counts.update(n=1), "changes the attribute counts"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_what_the_forward_changes_between_modules_is_refused_with_its_place(change, said):
    """Stages would each change a copy of their own, or nothing at all after the first step."""
    model = Changing(change)
    with pytest.raises(ConfigError, match=said) as raised:
        trace(model, {"x": torch.randn(3, 4)}, cut_points(model))
    assert "test_trace.py:" in str(raised.value)


def test_what_a_whole_module_changes_is_its_own():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            self.calls += 1
            return super().forward(x) * self.seen

    model = Steps()
    model.layers[1], model.calls = Counting(), 3
    model.between = lambda x, first: (setattr(model, "calls", 3), Updated()(None), x)[2]  # no change
    batch = {"x": torch.randn(3, 4)}
    output, _ = run_divided(model, batch, batch)
    assert model.layers[1].seen == 1
    model.layers[1].seen.zero_()
    assert torch.equal(output, model(**batch))


@pytest.mark.parametrize(
    ("names", "message"), [(["1"], "got 2"), (["layers.7"], "got 0"), (["layers.1", "layers.1"], "more than once")]
)
def test_split_points_are_named_by_the_end_of_one_name(names, message):
    model = nn.Sequential(Steps())
    assert resolve_split_points(model, ["layers.1"]) == ["0.layers.1"]
    with pytest.raises(ConfigError, match=message):
        resolve_split_points(model, names)
