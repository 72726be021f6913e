"""Linears: their collectives, and what a backward pass does with the gradients of weights.

With `fuse_wgrad_accumulation` a backward pass writes a weight's gradient to `main_grad` and hands autograd a stand-in
that holds nothing: over what is there in the first micro-batch, added to it in later ones. Where the module's
`wgrad_store` delays, it keeps the operands, and a gradient of a bias that the product makes is not returned.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, Quantized, quantized_weight
from transformer_engine.pytorch.module.base import get_dummy_wgrad
from transformer_engine.pytorch.norms import normalized


class WeightGradStore:
    """Whether weight gradients wait for `backward_dw`, which no run of Megatron's own schedules asks for here."""

    def __init__(self, delay_wgrad_compute: bool = False) -> None:
        assert not delay_wgrad_compute, "Megatron wants overlapped expert communication for it"

    def delay_wgrad_compute(self) -> bool:
        return False

    def put(self, operands: Sequence[Any], product: Callable[..., Any]) -> None:
        raise AssertionError("asked for by a backward pass that is not delayed")


class Module(nn.Module):
    """What linears have in common: the tensor-parallel group, how weights are drawn, their dtype.

    Args:
        options: kernels' and overlaps', which change no result.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        **options: object,
    ) -> None:
        super().__init__()
        assert parallel_mode in ("column", "row", None), f"parallel_mode {parallel_mode} not supported"
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else tp_group.size()
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        self._fp8_workspaces: dict[str, Quantized] = {}
        self.save_original_input = False  # either way its backward pass quantises the input
        self._drawn, self._tracker, self._tracked = init_method, get_rng_state_tracker, rng_tracker_name
        self._made = {"dtype": params_dtype, "device": device}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing is kept of any pass."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "fp8 is not rehearsed"

    def add_weight(self, name: str) -> None:
        """Make a weight, drawn from the tracker's state, and mark how it is divided."""
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **self._made))
        words = [self._tracked] if self._tracked else []
        with nullcontext() if self._tracker is None else self._tracker().fork(*words), torch.no_grad():
            self._drawn(weight)
        self._mark(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(name, weight)

    def add_bias(self, name: str) -> None:
        """Make a bias, or what stands for one that is not there."""
        if not self.use_bias:
            setattr(self, name, torch.empty(0, **self._made))
            return
        bias = nn.Parameter(torch.zeros(self.out_features, **self._made))
        if self.parallel_mode == "column":
            self._mark(bias, 0)
        elif self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        self.register_parameter(name, bias)

    def checked(self, inputs: Tensor) -> Tensor:
        """The inputs in one piece, of the parameters' dtype and device."""
        assert inputs.is_cuda, "TransformerEngine needs CUDA."
        for parameter in self.parameters(recurse=False):
            assert parameter.dtype == inputs.dtype, "Data types for parameters must match outside of autocasted region."
        assert inputs.size(-1) == self.in_features, "GEMM not possible"
        return inputs.contiguous()

    @staticmethod
    def _mark(parameter: Any, dimension: int) -> None:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


class Linear(Module):
    """A linear of one weight."""

    def __init__(self, in_features: int, out_features: int, **arguments: Any) -> None:
        super().__init__(in_features, out_features, **arguments)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.add_weight("weight")
        self.add_bias("bias")

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._product(self.checked(inputs), is_first_microbatch)

    def _product(self, inputs: Tensor, is_first: bool | None) -> Any:
        bias: Any = self.bias
        added = bias if self.apply_bias and not self.gemm_bias_unfused_add else None
        output = _Linear.apply(self.weight, inputs, added, self, is_first)
        if self.gemm_bias_unfused_add:
            output = output + bias
        return (output, bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """A norm, and a linear of what it makes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        **arguments: Any,
    ) -> None:
        assert not return_layernorm_output
        super().__init__(in_features, out_features, **arguments)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = torch.empty(in_features, **self._made).fill_(0.0 if zero_centered_gamma else 1.0)
        self.layer_norm_weight = nn.Parameter(start)
        self.layer_norm_bias = nn.Parameter(torch.zeros_like(start)) if normalization == "LayerNorm" else None
        for parameter in filter(None.__ne__, (self.layer_norm_weight, self.layer_norm_bias)):
            parameter.sequence_parallel = self.sequence_parallel

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Any:
        how = {"kind": self.normalization, "eps": self.eps, "centered": self.zero_centered_gamma}
        norm = self.layer_norm_weight, self.layer_norm_bias
        return self._product(normalized(self.checked(inputs), *norm, **how), is_first_microbatch)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, inputs: Tensor, bias: Tensor | None, linear: Linear, is_first: bool | None
    ) -> Tensor:
        ctx.linear, ctx.is_first, ctx.recipe = linear, is_first, FP8GlobalStateManager.recipe
        ctx.save_for_backward(weight, inputs)
        rows = inputs.flatten(0, -2)
        gathers = linear.sequence_parallel and linear.parallel_mode == "column"
        rows = _gathered(linear, rows) if gathers else rows
        if ctx.recipe is None:
            output = rows @ weight.t()
        else:
            ctx.weight = quantized_weight(weight, ctx.recipe, linear._fp8_workspaces, is_first)
            output = Quantized(rows, ctx.recipe).values @ ctx.weight.values.t()
        if linear.parallel_mode == "row" and linear.tp_size > 1:
            output = _summed(linear, output)
        output = output if bias is None else output + bias
        return output.view(-1, *inputs.shape[1:-1], output.size(-1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear, (weight, inputs) = ctx.linear, ctx.saved_tensors
        rows, of_output = inputs.flatten(0, -2), gradient.flatten(0, -2)
        if linear.sequence_parallel and linear.parallel_mode == "row":
            of_output = _gathered(linear, of_output)
        if ctx.recipe is not None:
            return _Linear._backward_in_eight_bits(ctx, rows, of_output)
        of_inputs = of_output @ weight
        if linear.parallel_mode == "column" and linear.tp_size > 1:
            of_inputs = _summed(linear, of_inputs)
        if not weight.requires_grad:
            return None, of_inputs.view_as(inputs), None, None, None
        if linear.sequence_parallel and linear.parallel_mode == "column":
            rows = _gathered(linear, rows)

        def product(rows: Tensor, of_output: Tensor) -> tuple[Tensor, Tensor | None]:
            return _weight_gradient(weight, rows, of_output, linear, ctx.is_first), of_output.sum(
                0
            ) if has_bias else None

        has_bias = linear.apply_bias and not linear.gemm_bias_unfused_add
        of_weight = of_bias = None
        if linear.wgrad_store.delay_wgrad_compute():
            linear.wgrad_store.put([rows, of_output], product)
        else:
            of_weight, of_bias = product(rows, of_output)
        of_weight = _for_autograd(weight, of_weight, linear)
        return of_weight, of_inputs.view_as(inputs), of_bias, None, None

    @staticmethod
    def _backward_in_eight_bits(ctx: Any, rows: Tensor, of_output: Tensor) -> tuple[Tensor | None, ...]:
        """As above, of operands that are no tensors; a gradient of the bias is made here and not by the product."""
        linear, (weight, inputs) = ctx.linear, ctx.saved_tensors
        has_bias = linear.apply_bias and not linear.gemm_bias_unfused_add
        of_bias = of_output.sum(0) if has_bias else None
        gradient = Quantized(of_output, ctx.recipe)
        of_inputs = gradient.values @ ctx.weight.values
        if linear.parallel_mode == "column" and linear.tp_size > 1:
            of_inputs = _summed(linear, of_inputs)
        if linear.sequence_parallel and linear.parallel_mode == "column":
            rows = _gathered(linear, rows)

        def product(rows: Quantized, of_output: Quantized) -> tuple[Tensor, None]:
            return _weight_gradient(weight, rows.values, of_output.values, linear, ctx.is_first), None

        of_weight = None
        operands = Quantized(rows, ctx.recipe), gradient
        if linear.wgrad_store.delay_wgrad_compute():
            linear.wgrad_store.put([*operands], product)
        else:
            of_weight, _ = product(*operands)
        of_weight = _for_autograd(weight, of_weight, linear)
        return of_weight, of_inputs.view_as(inputs), of_bias, None, None


class GroupedLinear(Module):
    """Linears of several experts, each of its share of the rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        single_grouped_weight: bool,
        single_grouped_bias: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(in_features, out_features, **arguments)
        assert not single_grouped_weight and not single_grouped_bias
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.add_weight(f"weight{number}")
            self.add_bias(f"bias{number}")

    def forward(self, inputs: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None) -> Any:
        splits = [int(rows) for rows in m_splits]
        assert len(splits) == self.num_gemms and sum(splits) == inputs.flatten(0, -2).size(0)
        weights, biases = ([getattr(self, f"{name}{n}") for n in range(self.num_gemms)] for name in ("weight", "bias"))
        added = biases if self.apply_bias else []
        output = _Grouped.apply(self.checked(inputs), splits, self, is_first_microbatch, *weights, *added)
        return (output, biases) if self.return_bias else output


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, splits: list[int], linear: GroupedLinear, is_first: bool | None, *parameters: Tensor
    ) -> Tensor:
        assert FP8GlobalStateManager.recipe is None, "experts in eight bits are not rehearsed"
        weights, biases = parameters[: len(splits)], parameters[len(splits) :]
        ctx.linear, ctx.is_first, ctx.splits = linear, is_first, splits
        ctx.save_for_backward(inputs, *weights)
        parts = inputs.flatten(0, -2).split(splits)
        output = torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])
        if biases:
            output = output + torch.cat([bias.expand(rows, -1) for bias, rows in zip(biases, splits, strict=True)])
        return output.view(*inputs.shape[:-1], -1) if output.numel() else inputs.new_empty(0, linear.out_features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        linear, (inputs, *weights) = ctx.linear, ctx.saved_tensors
        rows, of_output = (list(tensor.flatten(0, -2).split(ctx.splits)) for tensor in (inputs, gradient))
        of_inputs = torch.cat([part @ weight for part, weight in zip(of_output, weights, strict=True)])

        def product(rows: list[Tensor], of_output: list[Tensor], _: object) -> tuple[object, list[None], None]:
            pairs = zip(weights, rows, of_output, strict=True)
            gradients = [_weight_gradient(weight, a, b, linear, ctx.is_first) for weight, a, b in pairs]
            of_weights[:] = gradients
            return gradients, [None] * len(gradients), None

        of_weights: Any = [None] * len(weights)
        of_biases: list[Tensor | None] = [None] * (len(weights) if linear.apply_bias else 0)
        if linear.wgrad_store.delay_wgrad_compute():  # which computes gradients of biases, too
            linear.wgrad_store.put([rows, of_output, of_weights], product)
        else:
            of_weights = product(rows, of_output, None)[0]
            of_biases = [part.sum(dim=0) for part in of_output][: len(of_biases)]
        stand_ins = [
            _for_autograd(weight, gradient, linear) for weight, gradient in zip(weights, of_weights, strict=True)
        ]
        return of_inputs.view_as(inputs), None, None, None, *stand_ins, *of_biases


def _gathered(linear: Any, rows: Tensor) -> Tensor:
    """[tp × n, channels] of shares [n, channels]."""
    whole = rows.new_empty(len(rows) * linear.tp_size, rows.size(1))
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=linear.tp_group)
    return whole


def _summed(linear: Any, rows: Tensor) -> Tensor:
    """Summed over the ranks: a share of it under sequence parallelism, else all."""
    if not linear.sequence_parallel:
        dist.all_reduce(rows, group=linear.tp_group)
        return rows
    share = rows.new_empty(len(rows) // linear.tp_size, rows.size(1))
    dist.reduce_scatter_tensor(share, rows.contiguous(), group=linear.tp_group)
    return share


def _weight_gradient(weight: Any, rows: Tensor, of_output: Tensor, linear: Module, is_first: bool | None) -> Tensor:
    if not linear.fuse_wgrad_accumulation:
        return of_output.t() @ rows
    gradient: Tensor = weight.main_grad
    if is_first:
        gradient.zero_()
    return gradient.add_(of_output.t().to(gradient.dtype) @ rows.to(gradient.dtype))


def _for_autograd(weight: Any, gradient: Tensor | None, linear: Module) -> Tensor | None:
    """A stand-in where the gradient was added, or will be, to `main_grad`, which the hook on the weight expects."""
    if not linear.fuse_wgrad_accumulation or not hasattr(weight, "grad_added_to_main_grad"):
        return None if linear.fuse_wgrad_accumulation else gradient
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))
