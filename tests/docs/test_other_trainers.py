"""The adapters of docs/other-trainers.md, as they stand there, against the interfaces of the trainers they are for.

Upstream's modules are stubs of the same names and signatures (Megatron-LM's dev branch at d48bd6be, slime at 624b824a,
verl at b178a3cd); the HuggingFace trainer is the real one.
"""

import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from megatron_dynapipe.cost import A100_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.planning import batch
from megatron_dynapipe.units import ModelFamily

PAGE = Path(__file__).parents[2] / "docs/other-trainers.md"
SHAPE = {"hidden": 64, "heads": 4, "kv_channels": 16, "ffn": 256, "vocabulary": 100}
LENGTHS = [900, 30, 45, 500, 12, 77, 640, 20, 33, 210, 5, 81]


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model in place of the page's file."""
    rates = msgspec.structs.replace(A100_RATES, layer_overhead_us=1.0)  # so that batches are divided
    model = AnalyticCostModel(ModelShape(family=ModelFamily.GPT, **SHAPE), rates)
    monkeypatch.setattr(batch.TableCostModel, "load", lambda path: model)


def adapter(section: str) -> dict[str, Any]:
    """What a section's code defines."""
    text = PAGE.read_text().split(f"## {section}\n")[1]
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], namespace)
    return namespace


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> types.ModuleType:
    """A module of this name, of packages that are not installed."""
    for end in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: end + 1])
        module = sys.modules.get(part) or types.ModuleType(part)
        monkeypatch.setitem(sys.modules, part, module)
        if end:
            monkeypatch.setattr(sys.modules[part.rpartition(".")[0]], part.rpartition(".")[2], module, raising=False)
    vars(module).update(contents)
    return module


def every_once(micro_batches: Any) -> bool:
    return sorted(sample for one in micro_batches for sample in one) == list(range(len(LENGTHS)))


def test_the_function_itself(capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[1].startswith("(('F0'") and float(lines[-1]) > 0


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    class DpBalancedScheduler:
        dp_size, cp_size = 2, 2

    schedulers: dict[str, Any] = {}
    name = "megatron.core.datasets.data_schedule"
    module = stub(monkeypatch, name, DpBalancedScheduler=DpBalancedScheduler, scheduler_map=schedulers)
    assert module.scheduler_map is schedulers
    adapter("Megatron-LM, development branch")
    groups = schedulers["planned"]().get_groups_and_subsamples(list(enumerate(LENGTHS)))
    assert all(len(group) == 4 and group[0] == group[1] and group[2] == group[3] for group in groups)
    assert every_once(row for group in groups for row in group[::2])


def test_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    module = stub(monkeypatch, "slime.utils.dp_schedule")
    adapter("slime")
    partitions, indices, counts, sizes = module.build_dp_schedule(
        None, {"dp_size": 2}, LENGTHS + LENGTHS[:2], global_batch_size=6, rollout_indices=list(range(14))
    )
    assert every_once(partitions) and sizes == [6, 6]
    for partition, index in zip(partitions, indices, strict=True):
        assert [place for one in index for place in one] == list(range(len(partition))) and len(index) == sum(counts)


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(batch: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: value[rows] for name, value in batch.items()}

    balancing = stub(monkeypatch, "verl.utils.seqlen_balancing")
    stub(monkeypatch, "verl.utils.tensordict_utils", index_select_tensor_dict=select)
    stub(monkeypatch, "verl.utils.device", get_device_name=lambda: "cpu")
    adapter("verl")
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    padded = {"input_ids": mask, "attention_mask": mask}
    micro_batches, indices = balancing.rearrange_micro_batches(padded, 1000)
    assert every_once(indices)
    for micro_batch, rows in zip(micro_batches, indices, strict=True):
        assert micro_batch["attention_mask"].sum(1).tolist() == [LENGTHS[row] for row in rows]


def test_torch() -> None:
    sampler = adapter("Plain PyTorch")["PlannedBatches"]
    ranks = [sampler(LENGTHS, 6, replica, 2) for replica in (0, 1)]
    assert ranks[0].per_step == ranks[1].per_step and sum(ranks[0].per_step) == len(ranks[0])
    assert every_once(one for rank in ranks for one in rank)


def test_the_huggingface_trainer_has_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """Weights after a step are those of the undivided one, although micro-batches have different numbers of tokens."""
    planned_trainer = adapter("HuggingFace Trainer")["PlannedTrainer"]
    lengths = torch.tensor(LENGTHS[4:] + LENGTHS[1:3])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    tokens = torch.randint(0, 100, mask.shape, generator=torch.Generator().manual_seed(0))
    rows = [
        {"input_ids": ids, "attention_mask": own, "labels": ids.masked_fill(own == 0, -100)}
        for ids, own in zip(tokens, mask, strict=True)
    ]
    costs = "costs.json"
    planned = batch.plan_batch(lengths.tolist(), costs, layers=8, memory_mb=8000, micro_batch_layouts=("padded",))
    assert len(planned.samples[0]) > 1
    weights = []
    for kind in (planned_trainer, planned_trainer.__mro__[1]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=len(rows), max_steps=1, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
        )  # fmt: skip
        kind(model=model, args=arguments, train_dataset=rows).train()
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)
