"""One rank of a recipe's script, which `certify` starts by torchrun: `-m … ROLE PRECISION ITERATIONS FOLDER SCRIPT …`.

    begin        one process, one iteration                     ─► a checkpoint, from which the others go on
    reference    one process, samples one by one, Bridge's own schedule  ┐ losses and gradient norms of every iteration,
    planned      the script's layout and ranks, as planned               ┘ what the steps have made

The script runs as it is until its block of `planned` ends; then the process does.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.data.base import DatasetBuildContext
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.bridge import entry, recipe, relied_on
from megatron_dynapipe.megatron.bridge.layers import changed
from megatron_dynapipe.megatron.bridge.recipe import splits_of
from megatron_dynapipe.megatron.bridge.refusals import of_model
from megatron_dynapipe.megatron.bridge.run import PlannedRecipe
from megatron_dynapipe.megatron.entry.failure import reported
from megatron_dynapipe.megatron.equip.experts import RouterTerms, equip_experts, finish_iteration, routers_of
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.megatron.profiling.recipe import ON_ONE_STAGE
from megatron_dynapipe.processes import end_with_launcher
from megatron_dynapipe.tools.certify.flags import RATES
from megatron_dynapipe.tools.certify.parameters import frozen_of, gradients_of, steps_of, weights_of
from megatron_dynapipe.tools.certify.recipe import BEGIN, FP32, PLANNED, REFERENCE
from megatron_dynapipe.tools.certify.records import GRADIENTS, Part, RankRecord
from megatron_dynapipe.tools.certify.single_rows import Row, single_rows

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_ALONE: dict[str, Any] = {
    **ON_ONE_STAGE,
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
}
"""A model's layout in one process."""
_ADAPTERS_RATE = 1e-2
"""The rate of adapters, whose product begins at 0: smaller steps would hardly move it."""


class Certified:
    """A run for a certificate, on this rank.

    Args:
        role: one of the three above.
        precision: fp32, or another for the recipe's own.
        iterations: that are compared, after the one with which the runs begin.
        folder: the folder of all runs of the certificate.
    """

    def __init__(self, *, role: str, precision: str, iterations: int, folder: Path) -> None:
        self.role = role
        self.precision = precision
        self.iterations = iterations
        self.folder = folder
        self.record = RankRecord()
        self._weights: Sequence[Part] = []
        self._frozen: dict[str, int] = {}
        self._routers: Sequence[RouterTerms] = []

    @contextlib.contextmanager
    def planning(self, config: "ConfigContainer", run: PlannedRecipe) -> Iterator[None]:
        """Takes the place of `entry.planning`: the block of the recipe's script; the process ends with it."""
        self._settle(config)
        run.host.sources = replace(run.host.sources, report_folder=self.folder / "report")
        originals = Originals()
        originals.install([relied_on.step_recorder(self._before_step, self._after_step)])
        try:
            with _as_planned(config, run) if self.role == PLANNED else self._alone(config, run):
                yield
        finally:
            originals.revert()
        if not self.record.norms:
            raise ConfigError("expected training inside the block of planned(), found none")
        place = self.folder / f"{self.role}-{self.precision}"
        self.record.write(place, int(os.environ.get("RANK", "0")))
        raise SystemExit(0)

    @contextlib.contextmanager
    def _alone(self, config: "ConfigContainer", run: PlannedRecipe) -> Iterator[None]:
        """Bridge's own schedule over single samples; rank 0 of one."""
        model = of_model(config)
        for name, value in _ALONE.items():
            if hasattr(model, name):
                setattr(model, name, value)
        config.comm_overlap = None
        config.train.micro_batch_size = 1
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            setattr(config.ddp, name, False)
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            setattr(config.optimizer, name, False)
        originals = Originals()
        originals.install(relied_on.shared())

        def datasets(context: DatasetBuildContext) -> tuple[object, object, object]:
            run.datasets(context)  # where they are the recipe's own, their folder is written
            split = splits_of(config, run.host.long_samples, run.host.data, int(self.role != BEGIN))[0]
            return map(self._tell_routers, single_rows(run.host.data, split)), None, None

        try:
            with entry.per_token(config), changed(config, dataset=entry.PlannedDataset(datasets)):
                yield
        finally:
            originals.revert()

    def _settle(self, config: "ConfigContainer") -> None:
        """What is the certificate's own: rates, iterations, checkpoints, and in fp32 the precision."""
        model = of_model(config)
        checkpoint = config.checkpoint
        train = config.train
        mixed = config.mixed_precision
        mixed = get_mixed_precision_config(mixed) if isinstance(mixed, str) else mixed
        of_recipe = mixed or model
        self.record.half = next((half for half in ("bf16", "fp16") if getattr(of_recipe, half)), "")
        if self.precision == FP32:
            mixed = MixedPrecisionConfig(params_dtype=torch.float32, pipeline_dtype=torch.float32)
        elif mixed is not None and mixed.fp16:
            mixed.loss_scale = 1.0  # a dynamic one begins with iterations that are skipped
        config.mixed_precision = mixed
        model.attention_dropout = model.hidden_dropout = 0.0
        if config.peft is not None:
            config.peft.dropout = 0.0
        train.train_iters = 1 if self.role == BEGIN else 1 + self.iterations
        train.manual_gc = False
        config.validation.eval_iters = 0
        begun = str(self.folder / "begun")
        checkpoint.save, checkpoint.load = (begun, None) if self.role == BEGIN else (None, begun)
        checkpoint.save_interval = 1
        checkpoint.async_save = False
        checkpoint.load_optim = checkpoint.load_rng = False
        self._settle_rates(config)
        config.logger.log_interval = 1
        for name in ("tensorboard_dir", "wandb_project", "mlflow_experiment", "comet_project"):
            setattr(config.logger, name, None)

    def _settle_rates(self, config: "ConfigContainer") -> None:
        """Rates whose steps show in fp32, the same in every iteration, as for the flags of an entry script."""
        optimizer = config.optimizer
        rates = RATES.get(optimizer.optimizer, RATES["adam"])
        optimizer.lr = optimizer.min_lr = float(rates["--lr"]) if config.peft is None else _ADAPTERS_RATE
        if optimizer.decoupled_lr is not None:
            optimizer.decoupled_lr = optimizer.decoupled_min_lr = 2 * optimizer.lr
        optimizer.weight_decay = float(rates["--weight-decay"])
        scheduler = config.scheduler
        scheduler.start_weight_decay = scheduler.end_weight_decay = optimizer.weight_decay
        scheduler.weight_decay_incr_style = scheduler.lr_decay_style = "constant"
        scheduler.lr_warmup_iters = 0
        scheduler.lr_warmup_fraction = None
        self.record.notes = [f"optimizer.lr = {optimizer.lr}, optimizer.weight_decay = {optimizer.weight_decay:g}"]

    def _tell_routers(self, row: Row) -> Row:
        """A row of one sample, which the next pass runs: routers have the same terms as in planned iterations."""
        tokens = row["tokens"]
        assert tokens is not None
        for router in self._routers:
            router.begin(torch.zeros_like(tokens.t(), device=router.weight.device), 1)
        return row

    def _before_step(self, models: Any) -> None:
        if self.role != PLANNED:
            equip_experts(models)
            self._routers = routers_of(models)
        if not self.record.norms and self._has_steps:
            self._weights = weights_of(models)
            self._frozen = frozen_of(models)

    def _after_step(self, models: Any, optimizer: Any, losses: dict[str, torch.Tensor], norm: float | None) -> None:
        if self.role != PLANNED:
            finish_iteration(models, ProcessGroupCollection.use_mpu_process_groups())
        record = self.record
        record.losses += [float(loss) for name, loss in losses.items() if name == "lm loss"]
        record.norms.append(float(norm or 0.0))
        if not self._has_steps:
            return
        if self.role == REFERENCE and len(record.norms) == 1:
            record.parts[GRADIENTS] = gradients_of(models)
        if len(record.norms) == self.iterations:
            for model in models:
                if model.ddp_config.overlap_param_gather:  # which the next forward pass would wait for
                    model.start_param_sync(force_sync=True)
            record.parts |= steps_of(models, optimizer, self._weights)
            if before := self._frozen:
                after = frozen_of(models)
                record.unfrozen = sorted(name for name, digest in before.items() if after.get(name) != digest)

    @property
    def _has_steps(self) -> bool:
        """Whether this run's steps are compared: in fp32, as entry scripts' steps are."""
        return self.role != BEGIN and self.precision == FP32


_as_planned: Callable[[Any, PlannedRecipe], contextlib.AbstractContextManager[None]] = entry.planning


def main() -> None:
    """Run the script that the command line names; a `DynaPipeError` ends the process with its message."""
    end_with_launcher()
    role, precision, iterations, folder, script, *words = sys.argv[1:]
    with reported():
        certified = Certified(role=role, precision=precision, iterations=int(iterations), folder=Path(folder))
        entry.planning = certified.planning
        recipe.measured_costs = lambda *_, **__: None  # plans are exact by any costs, and nothing is written elsewhere
        sys.argv = [script, *words]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
        raise ConfigError(f"expected a block of planned(config) in {script}, it ended without one")


if __name__ == "__main__":
    main()
