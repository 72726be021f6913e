"""verl 0.9.1's Megatron engine, as far as the adapter of docs/other-trainers.md meets it, on ranks.

`test_every_call_in_verls_release_is_one_of_the_adapter` compares its calls with the release's.
"""

import re
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dynapipe.tools import loop as door
from tests.helpers import loops
from tests.helpers.layouts.layout import Layout

PAGE = Path(__file__).parents[2] / "docs/other-trainers.md"
Batch = dict[str, Any]


class MegatronEngine:
    """Cuts a batch, and calls a schedule function; both by their names in the engine's module."""

    def __init__(self, loop: loops.Loop) -> None:
        self.loop = loop
        self.module = loop.policy
        self.tf_config = loop.policy[0].config
        self.moved: list[str] = []

    def forward_backward_batch(
        self, data: Batch, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> tuple[list[Any], list[list[int]]]:
        own = sys.modules["verl.workers.engine.megatron.transformer_impl"]
        micro_batches, indices = own.prepare_micro_batches(
            data=data,
            dp_group=None,
            num_batches_divided_by=data.get("divided_by"),
            same_micro_num_in_dp=True,
            min_num_micro_batch=None,
        )
        for micro_batch in micro_batches:
            micro_batch["num_micro_batch"] = len(micro_batches)
        reports = own.get_forward_backward_func()(
            forward_step_func=partial(self.forward_step, data=data, update=not forward_only),
            data_iterator=iter(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports, indices

    def forward_step(self, batches: Iterator[Batch], model: torch.nn.Module, *, data: Batch, update: bool) -> Any:
        batch = next(batches)
        given = {name: data[name] for name in ("old", "reference") if name in data}
        (row,) = self.loop.rows([batch["place"].tolist()], **given)
        row["num_micro_batch"] = batch["num_micro_batch"]
        return self.loop.step(iter([row]), model, update=update)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.moved.append(device)


def get_non_tensor_data(data: Batch, key: str, default: Any) -> Any:
    return data.get(key, default)


def index_select_tensor_dict(data: Batch, indices: list[int]) -> Batch:
    return {"place": data["place"][indices]}


def install() -> types.ModuleType:
    """The modules that the adapter imports, and the adapter."""
    own = types.ModuleType("verl.workers.engine.megatron.transformer_impl")
    own.MegatronEngine = MegatronEngine
    utils = types.ModuleType("verl.utils.tensordict_utils")
    utils.get_non_tensor_data, utils.index_select_tensor_dict = get_non_tensor_data, index_select_tensor_dict
    for module in (own, utils):
        names = module.__name__.split(".")
        for end in range(1, len(names)):
            sys.modules.setdefault(".".join(names[:end]), types.ModuleType(".".join(names[:end])))
        sys.modules[module.__name__] = module
        setattr(sys.modules[".".join(names[:-1])], names[-1], module)
    text = PAGE.read_text().split("## verl\n")[1]
    (code, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code.replace("=60_000", "=1.9"), {})
    return own


def adapted(*, rank: int, world_size: int, layout: Layout) -> dict[str, Any]:
    """An iteration of the engine with the adapter, and one by Megatron; what the adapter refuses."""
    loops.MULTIPLE = 1  # verl pads for tensor and context parallel ranks alone
    loop = loops.Loop(layout)
    expected = loop.iteration(loops.by_megatron(loop), loops.by_megatron(loop))
    door.TableCostModel.load = lambda path: loops.costs()
    own = install()
    engine = own.MegatronEngine(loop)
    ids = torch.nested.as_nested_tensor([sample[:-1] for sample in loop.samples], layout=torch.jagged)
    data = {"input_ids": ids, "place": torch.arange(len(loop.samples))}
    counts = []

    def run(**given: Any) -> list[torch.Tensor]:
        reports, indices = engine.forward_backward_batch(data | given, None, forward_only=not given)
        counts.append(len(indices))
        outputs = [output for report in reports for output in report["model_output"]]
        places = [place for one in indices for place in one]
        return [output for _, output in sorted(zip(places, outputs, strict=bool(outputs)))]

    old = run()
    engine.to("cpu")
    asleep = engine.plans._control is None
    engine.to("cuda", model=False)
    still_asleep = engine.plans._control is None
    engine.to("cuda")
    for chunk in loop.policy:
        chunk.zero_grad_buffer()
    run(old=loop._on_all_stages({"outputs": old}), reference=expected["reference_everywhere"])
    refused = [
        _said(run, **wrong) for wrong in ({"use_dynamic_bsz": False}, {"divided_by": 2}, {"force_group_size": 2})
    ]
    return {
        "expected": expected,
        "found": {"gradients": loop.gradients(), "old": old},
        "counts": counts,
        "asleep": (asleep, still_asleep, engine.plans._control is None, engine.moved),
        "refused": refused,
    }


def _said(function: Callable[..., Any], **arguments: Any) -> str:
    try:
        function(**arguments)
    except ValueError as error:
        return str(error)
    return "nothing"
