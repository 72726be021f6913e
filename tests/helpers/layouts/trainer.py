"""A layout's model, stepped by `MegatronPipeline`."""

from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.tools.certify.parameters import parts_of
from megatron_dynapipe.tools.certify.records import Part
from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline, Tokens, global_batch
from megatron_dynapipe.ways.chains import chains
from tests.helpers.layouts.layout import EPSILON, Layout, samples
from tests.helpers.layouts.model import DTYPES, build, start, t5_split
from tests.helpers.layouts.planning import planner
from tests.helpers.layouts.reference import BOS, EOS

SEED = 11
assert Tokens() == Tokens(pad_id=0, bos_id=BOS, eos_id=EOS)


class Trainer:
    """One rank of a layout."""

    def __init__(self, layout: Layout, *, device: str = "cpu", backend: str = "gloo") -> None:
        self.layout = layout
        split = t5_split(layout)
        start(layout, split, backend)
        self.chunks = [chunk.to(device) for chunk in build(layout, split)]
        model_config = self.chunks[0].config
        if layout.dtype != "fp32":
            self.chunks = [Float16Module(model_config, chunk) for chunk in self.chunks]
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=layout.overlap,
            overlap_param_gather=layout.gather,
            use_distributed_optimizer=layout.distributed_optimizer,
            grad_reduce_in_fp32=layout.dtype != "fp32",
            bucket_size=layout.bucket_size,
        )
        self.models = [
            DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        scale = {} if layout.loss_scale is None else {"initial_loss_scale": layout.loss_scale, "hysteresis": 1}
        options = OptimizerConfig(
            optimizer="adam",
            lr=layout.learning_rate,
            adam_eps=EPSILON,
            weight_decay=0.0,
            clip_grad=1.0,
            fp16=layout.dtype == "fp16",
            bf16=layout.dtype == "bf16",
            params_dtype=DTYPES[layout.dtype],
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=layout.gather,
            **scale,
        )
        self.optimizer = get_megatron_optimizer(options, self.models)
        loss_on = LossOn.TARGETS if layout.targets else LossOn.EVERYTHING
        self.pipeline = MegatronPipeline(self.models, self.optimizer, planner(layout), loss_on=loss_on, seed=SEED)
        self.batch = samples(layout)

    def gradients(self) -> tuple[float, list[Part]]:
        """Loss and gradients of one iteration."""
        for model in self.models:
            model.zero_grad_buffer()
            model.force_all_reduce = True
        result = self.pipeline.run(self.batch, force_all_reduce=True)
        self.pipeline.iteration -= 1
        for model in self.models:
            model.force_all_reduce = False
        scale = self.optimizer.get_loss_scale()
        return result.loss, self._parts(lambda parameter: parameter.main_grad.float() / scale)

    def weights(self) -> list[Part]:
        return self._parts(lambda parameter: parameter.detach().clone())

    def _parts(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> list[Part]:
        return parts_of([m.module.module if self.layout.dtype != "fp32" else m.module for m in self.models], of)


def train(layout: Layout, *, steps: int = 5, **where: str) -> dict[str, object]:
    """Loss and gradients of the first iteration; then losses, norms and at last weights of `steps` from its start."""
    trainer = Trainer(layout, **where)
    loss, gradients = trainer.gradients()
    results = [trainer.pipeline.step(trainer.batch) for _ in range(steps)]
    plan = trainer.pipeline.planner.plan(global_batch(trainer.batch, trainer.layout.kind, 0), 0)
    return {
        "loss": loss,
        "gradients": gradients,
        "weights": trainer.weights(),
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "overflowed": [result.overflowed for result in results],
        "tokens": results[0].tokens if results else 0,
        "micro_batches": [len(replica.micro_batches) for replica in plan.replicas],
        "shapes": [list(mb.shape) for replica in plan.replicas for mb in replica.micro_batches],
        "packed": [_shares_a_row(mb) for replica in plan.replicas for mb in replica.micro_batches],
        "cut": sum(len(chains(replica.micro_batches)) for replica in plan.replicas),
        "modes": [mode.value for replica in plan.replicas for mb in replica.micro_batches for mode in mb.recompute],
    }


def _shares_a_row(micro_batch: MicroBatch) -> bool:
    return micro_batch.layout is BatchLayout.PACKED and len(micro_batch.sample_ids) > 1
