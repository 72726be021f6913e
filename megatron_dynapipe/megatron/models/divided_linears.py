"""Backward passes of Megatron's parallel linear layers in two halves.

    first half    gradient of the input, and its collectives; gradient of the bias
    second half   gradient of the weight, from the input and the output's gradient that the first half has left

A forward pass whose backward pass the plan divides runs the layers' linears through a function that hides the weight
from autograd: so nothing touches the weight's gradient, nor the hooks on it, before the second half. All other passes
run Megatron's own function. Embedding, head, norms and attention belong to the first half.

Transformer Engine's linears hand the rest of a backward pass to a store (`delay_wgrad_compute`). Theirs is first
in, first out for each module, while a plan runs second halves in any order and whole passes between them; and their
own `backward_dw` expects no second first half before it. So the store of each is one of ours (`EngineStore`).

Between the halves a tensor-parallel rank keeps its share of a sequence, as plans count, and gathers the rest while the
linear before is computed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

_ANCHOR = torch.empty(0, requires_grad=True)
"""An input that makes autograd run the backward of a linear whose own needs no gradient; it never gets one."""

Key = tuple[int, int]
"""(micro-batch, chunk)"""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One linear's settings, as Megatron passes them, and the group that gathers its output's gradient, if any."""

    weight: Tensor
    adds_to_main_grad: bool
    sums_input_gradient: bool
    gathers_input: bool
    group: Any
    gradient_group: object


@dataclass(slots=True, eq=False)
class Operand:
    """One side of a weight gradient's product, [positions, …]: all of it, or a rank's share.

    Attributes:
        tensor: what is kept; a list of tensors from grouped linears.
        group: tensor-parallel ranks that share it; None where it is whole.
    """

    tensor: Any
    group: Any = None
    _transfer: tuple[Tensor, Any] | None = None

    @classmethod
    def share(cls, whole: Tensor, group: Any) -> "Operand":
        """The rank's share of what all ranks of the group hold."""
        return cls(whole.chunk(group.size())[group.rank()].clone(), group)

    def start(self) -> None:
        """Start to gather it, once."""
        if self.group is not None and self._transfer is None:
            self._transfer = _gather(self.tensor, self.group, async_op=True)

    def whole(self) -> Any:
        """All of it."""
        self.start()
        if self._transfer is None:
            return self.tensor
        whole, work = self._transfer
        work.wait()
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The tensors that the first half of a linear's backward pass leaves to the second.

    Attributes:
        weights: one linear's, or the experts' of a grouped one.
        operands: the product's.
        gradients: the weights' gradients from whole operands, as autograd is to take them.
    """

    weights: Sequence[Tensor]
    operands: Sequence[Operand]
    gradients: Callable[..., Sequence[Tensor | None]]

    def start(self) -> None:
        """Start to gather the operands."""
        for operand in self.operands:
            operand.start()

    def run(self) -> Sequence[Tensor | None]:
        """The gradients."""
        return self.gradients(*[operand.whole() for operand in self.operands])


@dataclass(slots=True, eq=False)
class WeightHalves:
    """The products that first halves leave to second ones.

    Attributes:
        key: names the pass that runs, if its backward pass is divided.
    """

    key: Key | None = None
    _left: dict[Key, list[Product]] = field(default_factory=dict)

    def leave(self, key: Key, product: Product) -> None:
        """Keep a linear's product for the second half."""
        self._left.setdefault(key, []).append(product)

    def add_weight_gradients(self, key: Key, done: Callable[[Collection[Tensor]], None] | None = None) -> None:
        """Run the second half, through graphs of the weights alone, so that the hooks on them run.

        Products come in the order in which they were left, the last layer's first, as their gradients do in whole
        passes: the latest node runs first.

        Args:
            key: names the first half.
            done: called after each product with the weights that are still to come; without it all are one graph.
        """
        products = self._left.pop(key, [])
        pending = Counter(weight for product in products for weight in product.weights)
        while products and done is not None:
            pending -= Counter(products[0].weights)
            _add_gradients([products.pop(0)], *products[:1])
            done(pending)
        _add_gradients(products)

    def clear(self) -> None:
        """Drop what an iteration that did not end has left."""
        self.key = None
        self._left.clear()

    def linear(self, megatrons: Callable[..., Tensor], gradient_group: Any, **settings: Any) -> Tensor:
        """Takes the place of a layer's `_forward_impl`."""
        weight: Tensor = settings["weight"]
        if self.key is None or not torch.is_grad_enabled() or not weight.requires_grad:
            return megatrons(**settings)
        call = _Call(
            weight,
            settings["gradient_accumulation_fusion"],
            settings["allreduce_dgrad"],
            settings["sequence_parallel"],
            settings["tp_group"],
            gradient_group,
        )
        output: Tensor = _DividedLinear.apply(self, call, _ANCHOR, settings["input"], settings["bias"])
        return output


class _DividedLinear(torch.autograd.Function):
    """A linear whose backward makes the gradients of its input and bias."""

    @staticmethod
    @layers.custom_fwd
    def forward(
        ctx: Any, halves: WeightHalves, call: _Call, anchor: Tensor, inputs: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.halves = halves
        ctx.call = call
        ctx.key = halves.key
        ctx.has_bias = bias is not None
        ctx.save_for_backward(inputs)
        whole = _gather(inputs, call.group)[0] if call.gathers_input else inputs
        output = torch.matmul(whole, call.weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @layers.custom_bwd
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        call: _Call = ctx.call
        of_input = gradient.matmul(call.weight)
        work = None
        # What follows until the wait runs during the transfer.
        if call.gathers_input:
            whole = of_input
            of_input = torch.empty_like(inputs)
            work = layers.dist_reduce_scatter_func(of_input, whole.contiguous(), group=call.group, async_op=True)
        elif call.sums_input_gradient:
            work = torch.distributed.all_reduce(of_input, group=call.group, async_op=True)
        of_output = Operand.share(gradient, call.gradient_group) if call.gradient_group else Operand(gradient)
        operands = Operand(inputs, call.group if call.gathers_input else None), of_output
        ctx.halves.leave(ctx.key, Product([call.weight], operands, partial(_weight_gradient, call)))
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return None, None, None, of_input, of_bias


def _add_gradients(products: list[Product], following: Product | None = None) -> None:
    """Add up the gradients of these products, which are dropped; another follows them."""
    if not products:
        return
    followed = reversed([*zip(products, [*products[1:], following], strict=True)])
    ends = [_WeightGradient.apply(product, after, *product.weights) for product, after in followed]
    products.clear()  # each node drops its own
    torch.autograd.backward(ends, ends)


class _WeightGradient(torch.autograd.Function):
    """The second half of one linear's backward. Autograd takes what it returns as the gradient, without a copy."""

    @staticmethod
    def forward(ctx: Any, product: Product, following: Product | None, *weights: Tensor) -> Tensor:
        ctx.product = product
        ctx.following = following
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        product = ctx.product
        following = ctx.following
        ctx.product = ctx.following = None
        product.start()
        if following is not None:
            following.start()  # during this product
        return None, None, *product.run()


def _gather(share: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """The whole sequence, [positions, …], and the transfer, if it is not waited for."""
    whole = share.new_empty((share.shape[0] * group.size(), *share.shape[1:]))
    return whole, layers.dist_all_gather_func(whole, share.contiguous(), group=group, async_op=async_op)


def _weight_gradient(call: _Call, inputs: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """As the backward of Megatron's own function: where the product adds it up itself, a stand-in or None."""
    weight: Any = call.weight
    rows = gradient.flatten(0, -2).contiguous()
    columns = inputs.flatten(0, -2).contiguous()
    if not call.adds_to_main_grad:
        return [rows.t().matmul(columns)]
    fused: Any = layers.fused_weight_gradient_mlp_cuda
    single = weight.main_grad.dtype == torch.float32
    (fused.wgrad_gemm_accum_fp32 if single else fused.wgrad_gemm_accum_fp16)(columns, rows, weight.main_grad)
    return [_added(weight)]


def _added(weight: Any) -> Tensor | None:
    """The tensor that autograd gets of a gradient that is in `main_grad` already, as its hooks expect."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return (torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like)(weight)


class EngineStore:
    """Replaces the `WeightGradStore` of one of Transformer Engine's linears, which adds weight gradients up itself.

    Args:
        halves: the rank's.
        linear: a `Linear`, `LayerNormLinear` or `GroupedLinear`.
    """

    def __init__(self, halves: WeightHalves, linear: Any) -> None:
        self._halves = halves
        self._linear = linear

    def delay_wgrad_compute(self) -> bool:
        """Whether the pass that runs is divided."""
        return self._halves.key is not None

    def put(self, operands: Sequence[Any], product: Callable[..., Any]) -> None:
        """Keep what a backward pass leaves: operands, of a dense linear (input, output's gradient), and their product.

        The product makes a bias's gradient, too, and the backward pass then has none to return, which the hook on the
        bias does not expect: it is made here. Without fused accumulation it returns none for the weight either. In
        eight bits operands are no plain tensors, and the backward pass has made the bias's gradient itself.
        """
        linear = self._linear
        assert self._halves.key is not None, "asked for in divided passes alone"
        named = list(linear.named_parameters(recurse=False))
        of_outputs = operands[1] if isinstance(operands[1], list) else operands[1:2]  # a grouped one's
        is_plain = all(type(of_output) is Tensor for of_output in of_outputs)
        if is_plain and getattr(linear, "apply_bias", False) and not getattr(linear, "gemm_bias_unfused_add", False):
            biases = [bias for name, bias in named if name.startswith("bias")]
            for bias, of_output in zip(biases, of_outputs, strict=True):
                bias.grad = of_output.flatten(0, -2).sum(dim=0).to(bias.dtype)
        kept = [Operand(operand) for operand in operands]
        if linear.sequence_parallel and linear.tp_size > 1 and linear.parallel_mode in _GATHERED:
            place = _GATHERED[linear.parallel_mode]
            kept[place] = Operand.share(operands[place], linear.tp_group)
        weights = [weight for name, weight in named if name.startswith("weight")]

        fused = linear.fuse_wgrad_accumulation
        for weight in () if fused else weights:
            _expect_none(weight)

        def gradients(*whole: Any) -> Sequence[Tensor | None]:
            made = product(*whole)
            if fused:
                return [_added(weight) for weight in weights]
            # Grouped linears fill their third operand.
            unfused: Sequence[Tensor] = whole[2] if len(whole) > len(_SIDES) else made[:1]
            return unfused

        self._halves.leave(self._halves.key, Product(weights, kept, gradients))


class DividedModule:
    """A module that asks for itself whether a pass is divided, and leaves products.

    Attributes:
        halves: the rank's, once there is a planned iteration.
    """

    halves: WeightHalves | None = None


def _expect_none(weight: Any) -> None:
    """Give the hook of Megatron's data-parallel wrapper nothing to add for a weight whose gradient is to come.

    With overlapped reduction it stops at a weight without any; it adds this to `main_grad` and drops it.
    """
    if hasattr(weight, "main_grad"):
        weight.grad = weight.new_zeros(()).expand_as(weight)


_SIDES = ("input", "gradient")
"""Operands of a dense linear's product."""
_GATHERED = {"column": 0, "row": 1}
"""Which operand Transformer Engine gathers under sequence parallelism."""


def weight_halves(models: Sequence[nn.Module]) -> WeightHalves:
    """The halves of a rank's model chunks, whose layers' linears go through them from now on."""
    halves = WeightHalves()
    for model in models:
        for layer in (module for module in model.modules() if isinstance(module, TransformerLayer)):
            for linear in layer.modules():
                _divide(linear, halves)
    return halves


def _divide(linear: Any, halves: WeightHalves) -> None:
    """Let a module go through them, if it is a linear."""
    if isinstance(linear, DividedModule):
        linear.halves = halves
    elif getattr(linear, "wgrad_store", None) is not None:
        linear.wgrad_store = EngineStore(halves, linear)
    elif isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        # What such a layer does to its output gathers the gradient.
        gathers = isinstance(linear, RowParallelLinear) and linear.sequence_parallel
        gathers = gathers and not linear.explicit_expert_comm
        group = linear.tp_group if gathers else None
        vars(linear)["_forward_impl"] = partial(halves.linear, linear._forward_impl, group)
