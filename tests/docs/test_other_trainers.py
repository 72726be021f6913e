"""The adapters of docs/other-trainers.md, as they stand there, against the interfaces of the trainers they are for.

Upstream's modules are stubs of the same names and signatures (Megatron-LM's dev branch at d48bd6be, slime at 624b824a,
verl 0.9.1, whose wheel is read by a slow test); the HuggingFace trainer is the real one.
"""

import ast
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, ModelShape
from megatron_dynapipe.tools import batch
from tests.helpers.layouts.compare import assert_close, gradients_of
from tests.helpers.layouts.layout import Layout
from tests.helpers.processes import run_ranks

PAGE = Path(__file__).parents[2] / "docs/other-trainers.md"
ENGINE = Path(__file__).parent / "verl_engine.py"
SHAPE = {"hidden": 64, "heads": 4, "kv_channels": 16, "ffn": 256, "vocabulary": 100}
LENGTHS = [900, 30, 45, 500, 12, 77, 640, 20, 33, 210, 5, 81]


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model in place of the page's file."""
    model = AnalyticCostModel(ModelShape(family=ModelFamily.GPT, **SHAPE), A100_RATES)
    monkeypatch.setattr(batch.TableCostModel, "load", lambda path: model)


def adapter(section: str, memory_mb: int = 20) -> dict[str, Any]:
    """What a section's code defines, for a device so small that batches are divided."""
    text = PAGE.read_text().split(f"## {section}\n")[1]
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].replace("=8000", f"={memory_mb}"), namespace)
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


class DpBalancedScheduler:
    """As upstream constructs it, `BasePackingScheduler` included."""

    def __init__(
        self, max_seqlen_per_dp_cp_rank, cp_size, dp_size, microbatch_group_size_per_vp_stage, max_num_seqs=None
    ) -> None:
        vars(self).update(locals(), max_seq_len_all_ranks=max_seqlen_per_dp_cp_rank * cp_size, is_dynamic_cp=False)


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a name that upstream's configuration takes; what a plan cannot keep to is refused."""
    schedulers: dict[str, Any] = {"dp_balanced": DpBalancedScheduler, "default_dynamic_cp": DpBalancedScheduler}
    names = set(schedulers)
    stub(
        monkeypatch,
        "megatron.core.datasets.data_schedule",
        DpBalancedScheduler=DpBalancedScheduler,
        scheduler_map=schedulers,
    )
    adapter("Megatron-LM, development branch", memory_mb=12)
    scheduler = schedulers["dp_balanced"](512, 2, 2, None, max_num_seqs=None)
    assert set(schedulers) == names and isinstance(scheduler, DpBalancedScheduler)
    groups = scheduler.get_groups_and_subsamples(list(enumerate(LENGTHS)))
    assert all(len(group) == 4 and group[0] == group[1] and group[2] == group[3] for group in groups)
    assert every_once(row for group in groups for row in group[::2]) and len(groups) > 1
    for group_size, most in ((None, 4), (2, None)):
        with pytest.raises(ValueError, match="no limit of samples in a row, nor virtual stages"):
            schedulers["dp_balanced"](512, 2, 2, group_size, max_num_seqs=most)


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The schedule that the rollout manager calls, which has upstream's by name."""
    rollout = stub(monkeypatch, "slime.ray.rollout", build_dp_schedule=lambda: None)
    stub(monkeypatch, "slime.utils.arguments", parse_args=None)
    stub(monkeypatch, "train", train=None)
    adapter("slime", memory_mb=16)
    return lambda lengths, vpp_size=1, **settings: rollout.build_dp_schedule(
        None,
        {"dp_size": 2, "cp_size": 1, "vpp_size": vpp_size, "microbatch_group_size_per_vp_stage": 2},
        lengths,
        **settings,
    )


def test_slime(slime: Any) -> None:
    lengths = LENGTHS + LENGTHS + [50]
    partitions, indices, counts, sizes = slime(lengths, global_batch_size=12, rollout_indices=list(range(25)))
    assert sorted(chain(*partitions)) == list(range(24)) and sizes == [12, 12] and min(counts) > 1
    for partition, index in zip(partitions, indices, strict=True):
        assert [place for one in index for place in one] == list(range(len(partition))) and len(index) == sum(counts)


def test_slime_has_rollouts_of_several_samples_in_one_step(slime: Any) -> None:
    """Twelve samples of six rollouts are one step of six; of five, the last rollout's samples are left out."""
    rollouts = [7, 3, 7, 3, 1, 1, 0, 0, 4, 4, 9, 9]
    partitions, _, counts, sizes = slime(LENGTHS, global_batch_size=6, rollout_indices=rollouts)
    assert every_once(partitions) and sizes == [6] and len(counts) == 1
    partitions, _, counts, sizes = slime(LENGTHS, global_batch_size=5, rollout_indices=rollouts)
    assert sorted(chain(*partitions)) == list(range(10)) and sizes == [5]
    partitions, indices, counts, _ = slime(LENGTHS, global_batch_size=1, rollout_indices=rollouts)
    first = [
        [partition[i] for one in index[: counts[0]] for i in one]
        for partition, index in zip(partitions, indices, strict=True)
    ]
    assert sorted(chain(*first)) == [0, 2] and len(counts) == 6
    for settings in ({"vpp_size": 2, "global_batch_size": 6}, {"global_batch_size": 7}):
        with pytest.raises(ValueError, match="rollouts or more, and no virtual stages, got 6"):
            slime(LENGTHS, rollout_indices=rollouts, **settings)


def test_verl() -> None:
    """The engine's own loop: log-probabilities, an update whose gradient is as by Megatron's schedule, offloading."""
    ranks = run_ranks("tests.docs.verl_engine:adapted", 2, {"layout": Layout(stages=2, attention="megatron")})
    found, expected = (gradients_of([rank[name] for rank in ranks]) for name in ("found", "expected"))
    assert_close(found, expected, 1e-6)
    for rank in ranks:
        assert min(rank["counts"]) > 1
        assert rank["asleep"] == (True, True, False, ["cpu", "cuda", "cuda"])
        assert all("expected rows without padding, no virtual stages" in said for said in rank["refused"])
        for one, other in zip(rank["found"]["old"], rank["expected"]["old"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_every_call_in_verls_release_is_one_of_the_adapter(tmp_path: Path) -> None:
    """The wheel of the version that the page names; its dependencies are not needed to read it."""
    (version,) = re.findall(r"verl (\d+\.\d+\.\d+)", PAGE.read_text())
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(tmp_path)]
    if subprocess.run([*download, f"verl=={version}"], check=False, timeout=120).returncode:
        pytest.skip("no wheel of verl can be fetched")
    with zipfile.ZipFile(next(tmp_path.glob("verl-*.whl"))) as wheel:
        engine, utils = (
            ast.parse(wheel.read(f"verl/{name}.py"))
            for name in ("workers/engine/megatron/transformer_impl", "utils/tensordict_utils")
        )
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text().split("## verl\n")[1], re.DOTALL)[0]
    ours = functions(ast.parse(code))
    (theirs,) = (n for n in ast.walk(engine) if isinstance(n, ast.ClassDef) and n.name == "MegatronEngine")
    of_engine = functions(theirs)
    for name in ("forward_backward_batch", "to"):
        assert set(ours[name]) - {"others"} <= set(of_engine[name]), name
    assert set(ours["forward_backward_batch"]) == set(of_engine["forward_backward_batch"])
    made, written = (calls(tree) for tree in (theirs, ast.parse(ENGINE.read_text())))
    for name in ("prepare_micro_batches", "forward_backward_func"):
        assert made[name] == written[name], "the engine of these tests calls it likewise"
    assert made["prepare_micro_batches"] <= set(ours["prepare_micro_batches"])
    imported = {alias.name for n in engine.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert {"get_forward_backward_func", "prepare_micro_batches"} <= imported, "the names that the adapter replaces"
    for name in ("get_non_tensor_data", "index_select_tensor_dict"):
        assert name in functions(utils)


def functions(tree: ast.AST) -> dict[str, list[str]]:
    """Names of a tree's functions, with those of their parameters."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {node.name: [argument.arg for argument in node.args.args if argument.arg != "self"] for node in found}


def calls(tree: ast.AST) -> dict[str, set[str | None]]:
    """Names of the functions that a tree calls, with the keywords of the last call of each."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(node.func).rpartition(".")[2].removesuffix("()").removeprefix("get_") for node in found]
    return {name: {k.arg for k in node.keywords} for name, node in zip(names, found, strict=True) if node.keywords}


def test_torch() -> None:
    """Shuffled by torch's samplers, whose last batch is smaller; replicas come to the same steps."""
    sampler = adapter("Plain PyTorch")["PlannedBatches"]
    orders = [DistributedSampler(LENGTHS, num_replicas=1, rank=0, seed=1) for _ in range(2)]
    ranks = [sampler(BatchSampler(orders[n], 5, drop_last=False), LENGTHS, n, 2) for n in (0, 1)]
    epochs = []
    for epoch in (0, 1):
        for order in orders:
            order.set_epoch(epoch)
        loaders = [DataLoader(LENGTHS, batch_sampler=rank, collate_fn=list) for rank in ranks]
        lengths = [list(loader) for loader in loaders]
        assert sorted(n for rank in lengths for one in rank for n in one) == sorted(LENGTHS)
        assert ranks[0].per_step == ranks[1].per_step and len(ranks[0].per_step) == 3
        assert [len(rank) for rank in lengths] == [sum(ranks[0].per_step)] * 2
        epochs.append(lengths)
    assert epochs[0] != epochs[1]


def step_of(
    kind: type[Trainer], model: GPT2LMHeadModel, rows: list[dict[str, torch.Tensor]], folder: Path
) -> torch.Tensor:
    """Weights after one step with all rows."""
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=len(rows), max_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=1.0, max_grad_norm=0.0,
    )  # fmt: skip
    kind(model=model, args=arguments, train_dataset=rows).train()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def small_model(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return kind(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def padded_rows(left: Sequence[int] = ()) -> list[dict[str, torch.Tensor]]:
    """Samples padded on the right, and those named on the left."""
    lengths = torch.tensor(LENGTHS[4:] + LENGTHS[1:3])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    mask[list(left)] = mask[list(left)].flip(1)
    tokens = torch.randint(0, 100, mask.shape, generator=torch.Generator().manual_seed(0))
    return [
        {"input_ids": ids, "attention_mask": is_token, "labels": ids.masked_fill(is_token == 0, -100)}
        for ids, is_token in zip(tokens, mask, strict=True)
    ]


@pytest.mark.parametrize("left", [(), (0, 3, 5)])
def test_the_huggingface_trainer_has_the_gradient_of_the_whole_batch(left: tuple[int, ...], tmp_path: Path) -> None:
    """Weights after a step are those of the undivided one, although micro-batches have different numbers of tokens."""
    widths = []
    models = [small_model(), small_model()]
    for model in models:
        model.register_forward_pre_hook(
            lambda model, _, inputs: widths.append(inputs["input_ids"].size(1)), with_kwargs=True
        )
    kinds = adapter("HuggingFace Trainer")["PlannedTrainer"], Trainer
    planned, whole = (step_of(*pair, padded_rows(left), tmp_path) for pair in zip(kinds, models, strict=True))
    *divided, last = widths
    assert len(set(divided)) > 1 and max(divided) == last
    torch.testing.assert_close(planned, whole, rtol=1e-4, atol=1e-5)


def test_the_huggingface_trainer_refuses_a_model_whose_loss_is_a_mean_of_each_micro_batch(tmp_path: Path) -> None:
    class Plain(GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    with pytest.raises(ValueError, match="a loss by num_items_in_batch"):
        step_of(adapter("HuggingFace Trainer")["PlannedTrainer"], small_model(Plain), padded_rows(), tmp_path)
