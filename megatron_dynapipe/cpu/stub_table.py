"""The table of everything that is replaced so that Megatron trains without CUDA.

Megatron asks for CUDA on every path: it refuses to start without one, makes its tensors on one, and keeps the random
state of its dropouts in one. Patching what it calls is cheaper than intercepting every operation (a global
`TorchFunctionMode` taxes each of them). The tables are all there is: `megatron_dynapipe.cpu.platform` applies them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynapipe.cpu import cuda_stubs as stubs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """One replaced name.

    Attributes:
        owner: dotted path of the module or class that holds the name.
        name: the attribute that is replaced.
        make: from the original to its replacement.
        why: who calls it, and what would go wrong.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    why: str


def _row(owner: str, names: str, make: Callable[[Any], Any], why: str) -> tuple[Stub, ...]:
    return tuple(Stub(owner=owner, name=name, make=make, why=why) for name in names.split())


STUBS: tuple[Stub, ...] = (
    # What kind of machine this is.
    *_row("torch.cuda", "is_available", stubs.returning(True), "initialize_megatron asserts it"),
    *_row("torch.cuda", "device_count", stubs.returning(1), "model parallel groups are made only if there is one"),
    *_row("torch.cuda", "current_device", stubs.returning(0), "passed on as a device index everywhere"),
    *_row("torch.cuda", "is_initialized", stubs.returning(True), "queued calls (_lazy_call) run at once if so"),
    *_row("torch.cuda", "_lazy_init", stubs.always(stubs.nothing), "raises if there is no driver"),
    *_row("torch.cuda", "set_device init", stubs.always(stubs.nothing), "initialize_megatron picks the local rank's"),
    *_row("torch.cuda", "get_device_properties", stubs.always(stubs.device_properties), "arguments.py reads the arch"),
    *_row("torch.cuda", "get_device_capability", stubs.returning((8, 0)), "arguments.py and fused kernels read it"),
    *_row("torch.cuda", "get_device_name", stubs.returning("cpu"), "straggler detection and logs print it"),
    *_row("torch.cuda", "device", stubs.always(stubs.Scope), "entered around launches"),
    # Order of work: everything has finished when its call returns.
    *_row("torch.cuda", "synchronize", stubs.always(stubs.nothing), "timers and transfers wait for the device"),
    *_row("torch.cuda", "Stream ExternalStream", stubs.always(stubs.Stream), "gradient reduction has its own"),
    *_row("torch.cuda", "Event", stubs.always(stubs.Event), "timers and transfers mark points of a stream"),
    *_row("torch.cuda", "current_stream default_stream", stubs.returning(stubs.Stream()), "waited for by buckets"),
    *_row("torch.cuda", "stream", stubs.always(stubs.Scope), "DDP is built on a stream of its own"),
    *_row("torch.cuda", "set_stream", stubs.always(stubs.nothing), "initialize_megatron, for captured graphs"),
    *_row("torch.cuda", "is_current_stream_capturing", stubs.returning(False), "optimizers ask before each step"),
    *_row(
        "torch.accelerator",
        "is_available",
        stubs.returning(False),
        "asks torch.cuda; optimizers of PyTorch 2.13 and later then ask a driver for its current stream",
    ),
    # Random state: dropouts draw from the CPU's generator, so it is the device's too.
    *_row("torch.cuda", "get_rng_state", stubs.always(stubs.get_rng_state), "the tracker's regions, checkpoints"),
    *_row("torch.cuda.random", "get_rng_state", stubs.always(stubs.get_rng_state), "the tracker's regions"),
    *_row("torch.cuda", "set_rng_state", stubs.always(stubs.set_rng_state), "restoring a checkpoint"),
    *_row("torch.cuda.random", "set_rng_state", stubs.always(stubs.set_rng_state), "restoring a checkpoint"),
    *_row("torch.cuda", "manual_seed manual_seed_all", stubs.always(stubs.manual_seed), "the tracker seeds with it"),
    *_row("torch.cuda.random", "manual_seed manual_seed_all", stubs.always(stubs.manual_seed), "torch.manual_seed"),
    *_row("torch.cuda", "default_generators", stubs.always((torch.default_generator,)), "the tracker restores it"),
    # Memory is not counted.
    *_row("torch.cuda", "empty_cache reset_peak_memory_stats", stubs.always(stubs.nothing), "called between phases"),
    *_row(
        "torch.cuda",
        "memory_allocated memory_reserved max_memory_allocated max_memory_reserved device_memory_used",
        stubs.returning(0),
        "memory reports in the log",
    ),
    *_row("torch.cuda", "memory_stats", lambda original: lambda *_, **__: _ZeroStats(), "memory reports in the log"),
    *_row("torch.cuda", "mem_get_info", stubs.returning((0, 0)), "memory reports in the log"),
    # Marks for a profiler that is not there.
    *_row("torch.cuda.nvtx", "range_push range_pop mark", stubs.always(stubs.nothing), "marks around phases"),
    *_row("torch.cuda.nvtx", "range", stubs.always(stubs.Scope), "marks around phases"),
    # Tensors made on, or sent to, a CUDA device are the CPU's.
    *_row(
        "torch",
        "arange as_tensor empty empty_like empty_strided eye full full_like linspace normal ones ones_like rand "
        "rand_like randint randint_like randn randn_like randperm tensor zeros zeros_like",
        stubs.on_cpu,
        "called with device='cuda', 'cuda:N' or an index",
    ),
    *_row("torch.Tensor", "new_empty new_full new_ones new_tensor new_zeros", stubs.on_cpu, "as the factories"),
    *_row("torch.Tensor", "to", stubs.moving_to_cpu, "called with 'cuda' or an index"),
    *_row("torch.Tensor", "cuda pin_memory", stubs.staying, "batches, states and offloaded buffers"),
    *_row("torch.Tensor", "type", stubs.naming_cuda_types, "optimizers compare it with torch.cuda.FloatTensor"),
    *_row("torch.nn.Module", "to", stubs.moving_to_cpu, "called with 'cuda' or an index"),
    *_row("torch.nn.Module", "cuda", stubs.staying, "get_model moves every stage"),
    # Compilation costs minutes on a CPU and buys nothing for tests and demos.
    *_row("torch", "compile", stubs.compile_nothing, "Megatron's jit_fuser decorates with it when it is imported"),
)

IN_MEGATRON: tuple[Stub, ...] = (
    *_row(
        "megatron.core.datasets.utils",
        "compile_helpers",
        stubs.always(stubs.nothing),
        "runs make although a wheel has no Makefile, and exits if it fails; on GPUs `hooks/replacements` leaves it"
        " out of planned runs, here scripts of checkouts and other trainers run without those, too",
    ),
    *_row(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        stubs.always(stubs.to_host),
        "leaves the counts of experts' tokens alone that are on the host already, which collectives want as a list;"
        " GPUs copy them",
    ),
    *(
        Stub(
            owner="megatron.core.tensor_parallel.mappings",
            name=name,
            make=make,
            why="experts' tensor-parallel ranks; NCCL gathers uneven rows",
        )
        for name, make in (
            ("_gather_along_first_dim", stubs.gathering_uneven),
            ("_reduce_scatter_along_first_dim", stubs.scattering_uneven),
        )
    ),
)
"""Names in Megatron, replaced after torch's: finding them imports Megatron."""

SILENCED: tuple[Stub, ...] = tuple(
    Stub(owner=f"megatron.training.{module}", name=name, make=stubs.always(stubs.nothing), why=why)
    for module, name, why in (
        ("arguments", "_print_args", "prints some eight hundred lines, most of them of features that are off"),
        ("training", "report_theoretical_memory", "prints ten lines that know nothing of plans"),
        ("training", "print_datetime", "prints seven times of day at the start, in addition to the log's own"),
    )
)
"""Functions that print at start-up what nobody reads."""

SILENCED_ON_CPU: tuple[Stub, ...] = _row(
    "megatron.training.training",
    "report_memory",
    stubs.always(stubs.nothing),
    "prints, on every rank, counters that are zero without CUDA",
)

ENVIRONMENT: dict[str, str] = {
    "TORCH_COMPILE_DISABLE": "1",  # whatever calls Dynamo otherwise than through torch.compile
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # arguments.py demands it for tensor parallelism below capability 10
}
"""Environment variables that are set with the stubs, where the user has not set them."""


DEVICE_ONLY = ("transformer_engine", "apex", "amp_C")
"""Packages that Megatron prefers where it finds them, for its optimizer and its norms of gradients among others, and
whose kernels would take a CPU's tensors for a device's: it does not find them."""


class _ZeroStats(dict[str, int]):
    """Memory statistics in which every counter is zero."""

    def __missing__(self, key: str) -> int:
        return 0
