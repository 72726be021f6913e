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
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_dynapipe.data.segments import CutSegment, causal_mask
from megatron_dynapipe.integration.equip.attention import EngineRowsCore, RowsCore, cores_of
from megatron_dynapipe.integration.equip.equipped import Equipped
from megatron_dynapipe.integration.equip.told import NOTHING, Told
from megatron_dynapipe.integration.models.kept_keys import clear_kept_keys
from megatron_dynapipe.integration.models.packed_rows import DeviceSegments, self_row

SHORT, LONG = 8, 24
"""Positions of the two samples, which tensor-parallel ranks can divide."""
CUT = 16
"""Where the long one is cut."""
ALLOWED = {4: 1e-4, 2: 5e-2}
"""Difference relative to the largest value, by bytes of an element, of the median position: routers of experts may send
a few positions elsewhere after another rounding."""

Pass = Callable[[Tensor, Told], Tensor]
"""States or other inputs [positions, …] of what runs → results [positions, …]."""


@torch.no_grad()
def lacking(chunks: Sequence[nn.Module], equipped: Equipped) -> tuple[str, str]:
    """Why a rank's chunks can take no packed rows, and why no pieces; each empty where they can.

    All tensor- and expert-parallel ranks call it at the same point.
    """
    packed = pieces = ""
    for chunk in unwrap_model(list(chunks)):
        with _evaluating(chunk):
            for name, run, inputs, tell in (*_cores(chunk, equipped), *_chunk(chunk, equipped)):
                whole, cut = _apart(run, inputs, tell)
                allowed = ALLOWED[max(inputs.element_size(), min(ALLOWED))]
                packed = packed or (f"{name} mixes samples of a row: {whole:.1e} apart" if whole > allowed else "")
                pieces = pieces or (f"{name} counts a piece's positions anew: {cut:.1e} apart" if cut > allowed else "")
                clear_kept_keys([chunk])
        pieces = pieces or next(filter(None, (_unknown(core) for core, _ in cores_of([chunk]))), "")
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


def _chunk(chunk: Any, equipped: Equipped) -> Iterator[tuple[str, Pass, Tensor, Callable[[Told], None]]]:
    """The layers of a chunk, from random states."""
    if not len(chunk.decoder.layers):
        return
    config = chunk.config
    like = next(chunk.parameters())
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

    kind = next((type(layer).__name__ for layer in chunk.decoder.layers), "")
    yield kind, run, _drawn((SHORT + LONG, 1, config.hidden_size), like), equipped.tell


def _cores(chunk: nn.Module, equipped: Equipped) -> Iterator[tuple[str, Pass, Tensor, Callable[[Told], None]]]:
    """Each core attention by itself, with the shapes and the arguments with which its layer calls it."""
    calls: dict[int, tuple[Any, tuple[Tensor, ...], dict[str, Any]]] = {}

    def note(core: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls[id(core)] = core, arguments[:3], keywords

    hooks = [core.register_forward_pre_hook(note, with_kwargs=True) for core, _ in cores_of([chunk])]
    for _, run, inputs, _ in _chunk(chunk, equipped):
        run(inputs, NOTHING)
    for hook in hooks:
        hook.remove()
    for core, tensors, keywords in calls.values():
        sizes = [tensor.shape[2:].numel() for tensor in tensors]
        run_core = partial(_run_core, core, [tensor.shape[2:] for tensor in tensors], sizes, keywords)
        yield type(core).__name__, run_core, _drawn((SHORT + LONG, 1, sum(sizes)), tensors[0]), equipped.tell


def _run_core(core: Any, shapes: Any, sizes: Any, keywords: dict[str, Any], inputs: Tensor, told: Told) -> Tensor:
    parts = inputs.clone().split(sizes, dim=-1)
    query, key, value = (part.unflatten(-1, shape).contiguous() for part, shape in zip(parts, shapes, strict=True))
    masked = isinstance(core, DotProductAttention) and told.row is None
    mask = causal_mask(len(inputs), inputs.device) if masked else None
    output: Tensor = core(query, key, value, mask, **keywords)
    return output.float()


def _unknown(core: Any) -> str:
    """Why pieces are not given to a core attention whose own rules a few positions do not show; empty if it has none.

    One that scales queries from a certain place on would do so from each piece's beginning.
    """
    known = (RowsCore, EngineRowsCore, *RowsCore.__subclasses__())
    own = next(kind for kind in type(core).__mro__ if kind not in known and "forward" in vars(kind))
    ours = own.__module__.startswith(("megatron.core", "megatron_dynapipe", "transformer_engine"))
    return "" if ours else f"{own.__name__} has rules of its own, which may count positions"


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
