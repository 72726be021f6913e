"""Runs of Megatron-Bridge's training loop, planned and not, of the same samples, from the same HuggingFace weights.

Imported by ranks with rehearsed devices (`tests.helpers.rehearsal`), in an environment that has Megatron-Bridge.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
from megatron.bridge.data.sft_processing import ChatSFTPreprocessingConfig
from megatron.bridge.models.gemma import gemma2_provider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.activations import squared_relu
from megatron.core.utils import unwrap_model

from megatron_dynapipe.bridge import planned
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, MLP_LINEARS, described
from megatron_dynapipe.megatron.bridge import layers as layer_choice
from megatron_dynapipe.megatron.bridge.run import PlannedRecipe
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.megatron.hooks.replacements import TABLE
from megatron_dynapipe.megatron.supply import recorder
from megatron_dynapipe.report.records import StageRecord, decode_records
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts
from megatron_dynapipe.tools.certify import recipe_rank as certify_worker
from tests.helpers.bridge_families import configuration, flex_attention, with_plain_experts
from tests.helpers.bridge_forced import chosen, counting, fault, forcing
from tests.helpers.bridge_samples import BATCH, LENGTH, TEMPLATE, StockDataset, write_own_samples
from tests.helpers.entry_scripts import undrawn
from tests.helpers.random_dataset import VOCABULARY, word_tokenizer

LAYERS = 4
EPSILON = 1e-3
"""Adam's: a gradient near Bridge's 1e-8 is rounding, and moves its weight as far as any other."""
gemma2_provider._flex_attn_func = flex_attention


def make_model(folder: Path, family: str) -> Path:
    """A HuggingFace folder of random weights, with the tokenizer of `random_dataset`."""
    import transformers

    word_tokenizer(folder, VOCABULARY)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(configuration(family), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def recipe(
    model: Path,
    *,
    iterations: int = 5,
    pipeline: int = 1,
    tensor: int = 1,
    virtual: int | None = None,
    still: bool = False,
    lora: str | None = None,
    dora: bool = False,
    save: str | None = None,
    evaluations: int = 0,
    half: bool = False,
    own_samples: str | None = None,
    chats: bool = False,
    pattern: str = "",
    of_model: dict[str, Any] | None = None,
) -> Any:
    """A recipe of a small model, as a user would change one of Bridge's.

    Args:
        model: a HuggingFace folder.
        iterations: of training, in all.
        pipeline, tensor, virtual: the layout; tensor-parallel ranks are sequence-parallel, too.
        still: steps move nothing.
        lora: a checkpoint of Megatron's to train adapters on; None trains all weights.
        dora: the adapters are DoRA's in place of LoRA's.
        save: where checkpoints are saved, and loaded from if there is one.
        evaluations: batches of an evaluation.
        half: in bf16.
        own_samples: a folder of JSON lines, as the recipe's own samples.
        chats: these are conversations.
        pattern: of a HybridModel of random weights, in place of the folder's model.
        of_model: further attributes of the model.
    """
    config = _pretrain_common()
    bridge = AutoBridge.from_hf_pretrained(str(model), torch_dtype=torch.float32)
    provider = _hybrid(pattern) if pattern else bridge.to_megatron_provider(load_weights=lora is None)
    config.model = provider
    config.tokenizer.tokenizer_model = str(model)
    provider.seq_length = config.dataset.seq_length = LENGTH
    _lay_out(provider, pipeline, virtual, tensor)
    _compute_in(provider, torch.bfloat16 if half else torch.float32)
    for name, value in (with_plain_experts(provider) | (of_model or {})).items():
        setattr(provider, name, value)
    config.ddp.average_in_collective = False
    config.mixed_precision = "bf16_mixed" if half else None
    config.train.train_iters = iterations
    config.validation.eval_iters = evaluations
    _keep_short(config)
    if still:
        config.optimizer.lr = config.optimizer.min_lr = 0.0
    config.checkpoint.save = config.checkpoint.load = save
    config.checkpoint.save_interval = 2
    if lora is not None:
        config.peft = (DoRA if dora else LoRA)(dim=4, alpha=8)
        config.checkpoint.pretrained_checkpoint = lora
    if own_samples is not None:
        config.dataset = _own_samples(own_samples, chats=chats)
    return config


def _keep_short(config: Any) -> None:
    config.train.global_batch_size = BATCH
    config.train.micro_batch_size = 1
    config.validation.eval_interval = 2
    config.scheduler.lr_warmup_iters = 0
    config.scheduler.lr_decay_iters = 20
    config.logger.log_interval = 1
    config.logger.tensorboard_dir = None


def _lay_out(provider: Any, pipeline: int, virtual: int | None, tensor: int) -> None:
    provider.pipeline_model_parallel_size = pipeline
    provider.virtual_pipeline_model_parallel_size = virtual
    provider.tensor_model_parallel_size = tensor
    provider.sequence_parallel = tensor > 1


def _own_samples(folder: str, *, chats: bool) -> GPTSFTDatasetConfig:
    return GPTSFTDatasetConfig(
        dataset_root=folder,
        seq_length=LENGTH,
        do_validation=False,
        do_test=False,
        num_workers=0,
        preprocessing=ChatSFTPreprocessingConfig() if chats else None,
    )


def _hybrid(pattern: str) -> HybridModelProvider:
    """As Nemotron: networks of squares, no positions, experts' scores by sigmoids, and an expert that all share."""
    return HybridModelProvider(
        hybrid_layer_pattern=pattern,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        gated_linear_unit=False,
        activation_func=squared_relu,
        position_embedding_type="none",
        add_bias_linear=False,
        normalization="RMSNorm",
        vocab_size=VOCABULARY,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_grouped_gemm=True,
    )


def _compute_in(provider: Any, dtype: torch.dtype) -> None:
    """Of one type, by kernels that are rehearsed, without dropout."""
    provider.pipeline_dtype = provider.params_dtype = dtype
    provider.calculate_per_token_loss = True
    provider.bf16, provider.fp16 = dtype is torch.bfloat16, False
    provider.attention_dropout = provider.hidden_dropout = 0.0
    for fused in ("gradient_accumulation_fusion", "cross_entropy_loss_fusion", "masked_softmax_fusion"):
        setattr(provider, fused, False)
    for fused in ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"):
        setattr(provider, fused, False)


def saved_recipe(*, rank: int, world_size: int, folder: str, dim: int) -> str:
    """The path of a recipe with LoRA of this width, as Bridge saves it."""
    config = recipe(make_model(Path(folder, "llama"), "llama"), lora=folder)
    config.peft.dim = dim
    path = Path(folder, "recipe.yaml")
    config.to_yaml(str(path))
    return str(path)


class Kept(Callback):
    """Keeps losses, gradient norms and weights of a run.

    Args:
        model: the HuggingFace folder that it began from.
        export: where its weights are exported to at the end, as a HuggingFace folder; None for nowhere.
    """

    def __init__(self, model: str, export: str | None) -> None:
        self._model = model
        self._export = export
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: list[float] = []
        self.exported: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.trained = 0

    def on_train_step_end(self, context: CallbackContext) -> None:
        """After each iteration."""
        self.losses += [float(loss) for loss in (context.loss_dict or {}).values()]
        self.norms.append(float(context.grad_norm or 0.0))

    def on_eval_end(self, context: CallbackContext) -> None:
        """After each evaluation."""
        self.evaluated += [float(loss) for loss in (context.total_loss_dict or {}).values()]

    def on_train_end(self, context: CallbackContext) -> None:
        """At the end."""
        for chunk, model in enumerate(unwrap_model(context.model)):
            for name, weight in model.named_parameters():
                self.weights[f"{chunk}.{name}"] = weight.detach().cpu().clone()
                self.trained += weight.numel() if weight.requires_grad else 0
        if self._export is not None:
            self._compare_exported(context.model)

    def _compare_exported(self, models: Any) -> None:
        """Export the weights, and on one rank compute the logits of a few tokens there and here."""
        import transformers

        AutoBridge.from_hf_pretrained(self._model).save_hf_pretrained(models, self._export)
        if torch.distributed.get_world_size() > 1:
            return
        tokens = torch.arange(3, 3 + LENGTH)[None]
        there = transformers.AutoModelForCausalLM.from_pretrained(self._export, dtype=torch.float32)
        with torch.no_grad():
            self.exported["logits there"] = there(input_ids=tokens).logits
            here = models[0](tokens.cuda(), torch.arange(LENGTH)[None].cuda(), None)
            self.exported["logits here"] = here[..., : there.config.vocab_size].float().cpu()

    def kept(self) -> dict[str, Any]:
        """All of it."""
        names = ("losses", "norms", "evaluated", "weights")
        return {name: getattr(self, name) for name in names} | self.exported


@contextlib.contextmanager
def stock(config: Any, dataset: StockDataset) -> Iterator[None]:
    """Bridge's own loop over these samples; its wheels lack the Makefile that it looks for."""
    originals = Originals()
    originals.install([dataclasses.replace(row, everywhere=True) for row in TABLE if row.name == "compile_helpers"])
    config.dataset = dataset
    try:
        yield
    finally:
        originals.revert()


def train(
    *,
    rank: int,
    world_size: int,
    model: str,
    dataset: str,
    is_planned: bool,
    memory_limit_mb: float | None = None,
    export: str | None = None,
    calibrate_s: float = 0.0,
    forced: dict[str, Any] | None = None,
    multiple: int = 0,
    layers: str = layer_choice.RECIPE,
    broken: str = "",
    **layout: Any,
) -> dict[str, Any]:
    """On one rank: what a run `Kept`, and of a planned one micro-batches, and what was counted of its state.

    Args:
        rank, world_size: as torchrun says.
        model: a HuggingFace folder.
        dataset: a dataset folder; with a recipe's own samples the folder in which the planned run has kept them, and
            that run's report folder.
        is_planned: whether plans run, or Bridge's own schedule.
        memory_limit_mb, calibrate_s: as `planned`.
        export: as `Kept`.
        forced: settings of plans in place of what is free to choose.
        multiple: of the lengths of rows, without plans; 0 for one length.
        broken: as `fault`.
        layers: as `planned`, or layers per stage in place of what would be chosen.
        layout: as `recipe`.
    """
    torch.cuda.set_device(rank)
    config = recipe(Path(model), **layout)
    config.optimizer.adam_eps = EPSILON
    own = config.dataset if layout.get("own_samples") else None
    kept = Kept(model, export)
    loop = finetune if config.peft is not None else pretrain
    if not is_planned:
        found = dataset if own is None else str(next(Path(dataset).glob("samples-*")))
        with stock(config, StockDataset(dataloader_type="external", folder=found, own=own, multiple=multiple)):
            loop(config=config, forward_step_func=forward_step, callbacks=[kept])
        return kept.kept()
    recorder._told = undrawn
    report = dataset if own is not None else f"{dataset}-report"
    given = {"report_folder": report, "memory_limit_mb": memory_limit_mb, "calibrate_s": calibrate_s}
    given |= {"layers": layers if layers in layer_choice.LAYERS else layer_choice.AUTO}
    with (
        chosen(layers),
        fault(broken),
        counting() as seen,
        planned(config, None if own is not None else dataset, **given) as run,
    ):
        run.host._inputs_of = partial(forcing, run.host._inputs_of, forced or {})
        loop(config=config, forward_step_func=forward_step, callbacks=[kept])
    return kept.kept() | _counted(run, kept, Path(report) / f"rank-{rank}.jsonl") | {"seen": dict(seen)}


def _counted(run: PlannedRecipe, kept: Kept, records: Path) -> dict[str, Any]:
    """What a planned run says of its rows, its state and its records."""
    assert run.latest is not None
    assert run.inputs is not None
    recorded = decode_records(records.read_bytes(), origin=str(records))
    rows = run.latest.entry.micro_batches
    return {
        "packed": any(row.layout == "packed" for row in rows),
        "micro_batches": len(rows),
        "slices": run.inputs.planner.slices,
        "state_bytes": run.inputs.planner.model_state_bytes,
        "adapter": _adapter(run.inputs.costs),
        "weight_bytes": sum(weight.nbytes for weight in kept.weights.values()),
        "trained": kept.trained,
        "recorded": [record.iteration for record in recorded if isinstance(record, StageRecord)],
    }


def _adapter(costs: AnalyticCosts | MeasuredCosts) -> int | str:
    """Parameters of a layer's adapters by computed costs; the adapters of measured ones, in words."""
    if isinstance(costs, MeasuredCosts):
        return described(costs.load().file.adapters)
    return costs.shape.adapter_parameters(ATTENTION_LINEARS + MLP_LINEARS, 1)


def refused(*, rank: int, world_size: int, model: str, dataset: str) -> list[str]:
    """What is said of a second run inside the first, and of other outputs than the loss; the recipe is as it was."""
    config = recipe(Path(model))
    before = (config.dataset, config.model.calculate_per_token_loss)
    said = []
    with planned(config, dataset) as run:
        try:
            with planned(recipe(Path(model)), dataset):
                pass
        except ConfigError as error:
            said.append(error.message)
        try:
            run.forward_backward(forward_step_func=None, data_iterator=None, model=[], collect_non_loss_data=True)
        except ConfigError as error:
            said.append(error.message)
    assert (config.dataset, config.model.calculate_per_token_loss) == before
    return said


def certified(
    *, rank: int, world_size: int, role: str, precision: str, folder: str, dataset: str, settings: dict[str, Any]
) -> None:
    """One rank of a run that `certify` starts, of `bridge_script` with these settings of a recipe."""
    torch.cuda.set_device(rank)
    Path(folder, f"{role}-{precision}").mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("bridge_script.py")
    sys.argv = ["certified", role, precision, "2", folder, str(script), dataset, json.dumps(settings)]
    try:
        certify_worker.main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(
                f"{role} in {precision} ended with status {ended.code}, for a reason said above"
            ) from ended


def prepare(*, rank: int, world_size: int, folder: str, families: Sequence[str]) -> None:
    """Make the families' HuggingFace folders, and a recipe's own samples."""
    for family in families:
        make_model(Path(folder, family), family)
    write_own_samples(Path(folder, "own"), chats=False)
    write_own_samples(Path(folder, "chats"), chats=True)
