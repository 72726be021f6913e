"""What built layers can take, measured on themselves: packed rows and pieces against samples alone.

    alone    a a   b b b b b b        states of both samples, a pass each
    packed   a a b b b b b b          one pass
    pieces   b b b b │ b b a a        two passes; a piece's keys stay for the next

A list of families would grow old. What knows positions in other ways than by rotations (a core attention that scales
queries by their place), or carries a state from one sample to the next (a recurrent mixer), differs here, and is not
given what it cannot take. Core attention is measured by itself, too, with scores of size 1: behind norms and linears of
random weights its share of a result may be lost in the rounding of half precision.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.data.segments import CutSegment, causal_mask
from megatron_dynapipe.megatron.equip.attention import HALF, EngineRowsCore, RowsCore, cores_of
from megatron_dynapipe.megatron.equip.equipped import Equipped
from megatron_dynapipe.megatron.equip.told import NOTHING, Told
from megatron_dynapipe.megatron.models.kept_keys import clear_kept_keys
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, self_row

SHORT, LONG = 8, 24
"""Positions of the two samples, which tensor-parallel ranks can divide."""
CUT = 16
"""Where the long one is cut."""
ALLOWED = {4: 1e-4, 2: 5e-2}
"""Difference relative to the largest value, by bytes of an element, of the median position: routers of experts may send
a few positions elsewhere after another rounding."""

Pass = Callable[[Tensor, Told], Tensor]
"""States or other inputs [positions, …] of what runs → results [positions, …]."""


Measured = tuple[str, Pass, Tensor]
"""What is measured, by name: what runs it, and its inputs [positions, …]."""
Call = tuple[Any, tuple[Tensor, ...], dict[str, Any]]
"""A core attention, and what its layer gives it: [positions, 1, heads, channels] each, and arguments."""


@torch.no_grad()
def lacking(chunks: Sequence[nn.Module], equipped: Equipped) -> tuple[str, str]:
    """Why a rank's chunks can take no packed rows, and why no pieces; each empty where they can.

    All tensor- and expert-parallel ranks call it at the same point.
    """
    packed = pieces = ""
    for chunk in unwrap_model(list(chunks)):
        with _evaluating(chunk):
            calls = _calls(chunk)
            for name, run, inputs in (*map(_core, calls), *_layers(chunk)):
                whole, cut = _apart(run, inputs, equipped.tell)
                allowed = ALLOWED[max(inputs.element_size(), min(ALLOWED))]
                packed = packed or (f"{name} mixes samples of a row: {whole:.1e} apart" if whole > allowed else "")
                pieces = pieces or (f"{name} counts a piece's positions anew: {cut:.1e} apart" if cut > allowed else "")
                clear_kept_keys([chunk])
        pieces = pieces or next(filter(None, map(_uncut_because, calls)), "")
    return packed, packed or pieces


def _apart(run: Pass, inputs: Tensor, tell: Callable[[Told], None]) -> tuple[float, float]:
    """How far a packed row and a cut one are from samples alone, relative, at the median of the positions concerned."""

    def told(part: Tensor, lengths: tuple[int, ...] = (), cuts: Mapping[int, CutSegment] | None = None) -> Tensor:
        record = Told(row=self_row(DeviceSegments.of(lengths, inputs.device, cuts))) if lengths else NOTHING
        tell(record)
        return run(part, record)

    short, long = inputs[:SHORT], inputs[SHORT:]
    try:
        alone = told(short), told(long)
        packed = told(inputs, (SHORT, LONG))
        told(long[:CUT], (CUT,), {0: CutSegment(0, 0, followed=True)})
        rest = torch.cat([long[CUT:], short])
        last = told(rest, (LONG - CUT, SHORT), {0: CutSegment(0, CUT, followed=False)})
    finally:
        tell(NOTHING)
    most = max(float(result.abs().max()) for result in alone) or 1.0

    def median(actual: Tensor, expected: Tensor) -> float:
        of_positions: list[float] = (actual - expected).abs().flatten(1).amax(1).tolist()
        return statistics.median(of_positions) / most

    return median(packed[SHORT:], alone[1]), median(last[: LONG - CUT], alone[1][CUT:])


def _layers(chunk: Any) -> Iterator[Measured]:
    """The layers of a chunk, from random states."""
    if not len(chunk.decoder.layers):
        return
    config = chunk.config
    tensor_parallel = parallel_state.get_tensor_model_parallel_group() if config.sequence_parallel else None
    masked = any(isinstance(core, DotProductAttention) for core, _ in cores_of([chunk]))

    def run(states: Tensor, told: Told) -> Tensor:
        length = len(states)
        if tensor_parallel is not None:
            states = states.chunk(tensor_parallel.size())[tensor_parallel.rank()]
        chunk.set_input_tensor(states)
        positions = torch.arange(length, device=states.device)[None]
        mask = causal_mask(length, states.device) if masked and told.row is None else None
        output: Tensor = chunk(None, positions, mask, decoder_input=states)
        chunk.set_input_tensor(None)
        if chunk.post_process:
            return output.transpose(0, 1).float()
        whole = output if tensor_parallel is None else gather_from_sequence_parallel_region(output)
        return whole.float()

    shape = (SHORT + LONG, 1, config.hidden_size)
    yield type(chunk.decoder.layers[0]).__name__, run, _drawn(shape, next(chunk.parameters()))


def _calls(chunk: nn.Module) -> list[Call]:
    """How each core attention of a chunk is called."""
    calls: list[Call] = []
    hooks = [
        core.register_forward_pre_hook(
            lambda core, arguments, keywords: calls.append((core, arguments[:3], keywords)), with_kwargs=True
        )
        for core, _ in cores_of([chunk])
    ]
    for _, run, inputs in _layers(chunk):
        run(inputs, NOTHING)
    for hook in hooks:
        hook.remove()
    return calls


def _core(call: Call) -> Measured:
    """A core attention by itself, of queries and keys whose scores are about 1."""
    core, tensors, keywords = call
    shapes = [tensor.shape[2:] for tensor in tensors]
    sizes = [shape.numel() for shape in shapes]

    def run(inputs: Tensor, told: Told) -> Tensor:
        parts = zip(inputs.split(sizes, dim=-1), shapes, strict=True)
        query, key, value = (part.unflatten(-1, shape).clone() for part, shape in parts)
        masked = isinstance(core, DotProductAttention) and told.row is None
        output: Tensor = core(
            query, key, value, causal_mask(len(inputs), inputs.device) if masked else None, **keywords
        )
        return output.float()

    return type(core).__name__, run, _drawn((SHORT + LONG, 1, sum(sizes)), tensors[0])


def _uncut_because(call: Call) -> str:
    """Why pieces are not given to a core attention, although a short one is right; empty if nothing speaks against it.

    One with rules of its own may scale queries from a certain place on, and would begin anew with every piece. Without
    a fused kernel Transformer Engine keeps the scores of a piece with all keys before it.
    """
    core, tensors, _ = call
    mixins = (RowsCore, *RowsCore.__subclasses__())
    own = next(kind for kind in type(core).__mro__ if kind not in mixins and "forward" in vars(kind))
    if not own.__module__.startswith(_KNOWN):
        return f"{own.__name__} has rules of its own, which may count positions"
    if isinstance(core, EngineRowsCore) and tensors[0].element_size() == HALF:
        query, key, value = tensors
        has_kernel = core.has_kernel(query, key, value, "padding_causal_bottom_right")
        return "" if has_kernel else "Transformer Engine has no fused attention for them"
    return ""


_KNOWN = ("megatron.core", "megatron_dynapipe", "transformer_engine")
"""Packages whose core attention counts no positions."""


def _drawn(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The same on all ranks; training's generators stay as they are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(like.device, like.dtype)


@contextmanager
def _evaluating(chunk: nn.Module) -> Iterator[None]:
    training = chunk.training
    chunk.eval()
    try:
        yield
    finally:
        chunk.train(training)
