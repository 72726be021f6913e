"""One run's share of DynaPipe on this rank: store, planner, iterators, executor, records; opened, used, closed.

    with Session(args, family, …) as session, seam.installed(session):
        pretrain(…, session.datasets, …)

Everything is started when Megatron asks for its datasets: by then the process groups exist and a checkpoint has told
where training resumes. Ranks start things in the same order, and a failure on one is raised on all.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from megatron.core import parallel_state

from megatron_dynapipe.data.collate import Collator, HostMicroBatch, Needs
from megatron_dynapipe.data.iterator import PlannedIteration, PlannedIterator
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.errors import ConfigError, StoreError
from megatron_dynapipe.integration.arguments import RunSettings
from megatron_dynapipe.integration.control import ControlGroup
from megatron_dynapipe.integration.forward_backward import run_iteration
from megatron_dynapipe.integration.groups import connect
from megatron_dynapipe.integration.inputs import describe
from megatron_dynapipe.integration.iterators import AgreedIterator
from megatron_dynapipe.integration.learning import PassLearner
from megatron_dynapipe.integration.metrics import MetricsWriter, count_flops
from megatron_dynapipe.integration.model_state import StateBytes
from megatron_dynapipe.integration.pass_state import PassState
from megatron_dynapipe.integration.passes import DeviceBatch, PrepareMicroBatch
from megatron_dynapipe.integration.recorder import Recorder
from megatron_dynapipe.runtime import PipelineExecutor, TorchTransport, Watchdog, platform_of
from megatron_dynapipe.sampling import LengthTable, Sampler
from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.process import PlannerProcess
from megatron_dynapipe.service.recalibration import Recalibration
from megatron_dynapipe.service.settings import PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import PlanKeys, PlanStore, StoreAddress, StoreServer, new_job_name, open_store
from megatron_dynapipe.units import Shape, input_positions, target_positions

MakeBatch = Callable[[HostMicroBatch, torch.device], DeviceBatch]


class Session:
    """A run on this rank.

    Args:
        settings: what was asked for.
        inputs: makes what plans are made from; called once Megatron knows where training resumes.
        needs: which tensors this rank's stage reads; called once the pipeline exists.
        make_batch: host tensors to what the step function takes.
        chunks: virtual stages per rank.
        dtype: of the tensors that cross stage boundaries.
        device: this rank's device.
        state: what a parameter's copies take; None leaves a model's memory to the cost model.
        seed: of dropouts.
        metrics_interval: iterations between two whose numbers are given to Megatron's writers.

    Attributes:
        shape: of the micro-batch whose pass is running.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        inputs: Callable[[], PlanInputs],
        needs: Callable[[], Needs],
        make_batch: MakeBatch,
        chunks: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        metrics_interval: int,
        state: StateBytes | None = None,
    ) -> None:
        self._settings = settings
        self._make_inputs = inputs
        self._make_needs = needs
        self._make_batch = make_batch
        self._chunks = chunks
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._metrics_interval = metrics_interval
        self._state = state
        self._modules: list[torch.nn.Module] = []
        self._pass_state: PassState | None = None
        self._resources = ExitStack()
        self._iterators: dict[str, AgreedIterator] = {}
        self._trained: PlannedIteration | None = None
        self.shape: Shape | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def datasets(self, _samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        """Megatron's dataset provider for `--dataloader-type external`: the iterators of the three splits.

        Chunks of a rank share them; the schedule takes one item per iteration, whatever their number.
        """
        if not self._iterators:
            self._start()
        return self._iterators["train"], self._iterators.get("valid"), self._iterators.get("test")

    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: call it on every tensor-parallel rank

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **_shapes: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's schedule function: one planned iteration. The shapes it passes are nominal; the plan's count."""
        if collect_non_loss_data:
            raise ConfigError("DynaPipe runs plans of the loss alone: it cannot collect other outputs of the model")
        models = model if isinstance(model, list) else [model]
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        item: PlannedIteration = next(iterator)
        result = run_iteration(
            item.entry.stage_plan,
            self._executor,
            models,
            forward_step_func,
            lambda index: self._make_batch(item.micro_batches[index], self._device),
            stage=self._stage,
            stages=self._stages,
            prepare=self._prepare(models, item),
            forward_only=forward_only,
            force_all_reduce=force_all_reduce,
        )
        if not forward_only:
            self._trained = item
            self._recorder.add(item, result.trace)
            count_flops(item)
            self._iterators["train"].prepare()
        return result.losses

    def _prepare(self, models: Sequence[torch.nn.Module], item: PlannedIteration) -> PrepareMicroBatch:
        """Sets the model chunks for each micro-batch of an iteration."""
        if self._pass_state is None:
            self._pass_state = PassState(
                models,
                seed=self._seed,
                replica=parallel_state.get_data_parallel_rank(),
                tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                stage=self._stage,
            )
        state, entry = self._pass_state, item.entry

        def prepare(index: int) -> None:
            micro_batch = entry.micro_batches[index]
            self.shape = micro_batch.shape
            state.begin(entry.iteration, index, micro_batch.recompute)

        return prepare

    @property
    def samples(self) -> int:
        """Samples of the latest training iteration; one must have run."""
        assert self._trained is not None, "no iteration has been trained"
        return self._trained.entry.totals.samples

    def log_text(self) -> str:
        """The latest training iteration's plan in the form of Megatron's log line; empty before the first."""
        if self._trained is None:
            return ""
        totals = self._trained.entry.totals
        efficiency = totals.real_tokens / max(totals.padded_positions, 1)
        micro_batches = "+".join(map(str, totals.micro_batches))
        return (
            f" micro-batches: {micro_batches} | padding efficiency: {efficiency:.3f} |"
            f" plan wait (ms): {self._trained.waited_seconds * 1e3:.1f} |"
        )

    def print_report(self) -> None:
        """At the run's end: gather every rank's records and print the summary, on rank 0."""
        summary = self._recorder.report() if self._iterators else None
        if summary is not None:
            print(summary, flush=True)

    def _start(self) -> None:
        stack = self._resources
        self._control = ControlGroup(timeout_s=self._settings.timeout_s)
        inputs = self._with_model_state(self._control.run_on_all(self._make_inputs))
        self._control.run_on_all(lambda: self._check_samples(inputs))
        groups = connect(self._control, chunks=self._chunks, device=self._device, timeout_s=self._settings.timeout_s)
        self._stage, self._stages = groups.ranks.index(self._control.rank), len(groups.ranks)
        platform = platform_of(self._device)
        transport = TorchTransport(groups.channels, groups.ranks, deadline_s=self._settings.timeout_s)
        self._executor = PipelineExecutor(
            transport, platform, stages=self._stages, dtype=self._dtype, watch=self._watchdog()
        )
        store, keys = self._open_store(inputs)
        replica, rank = parallel_state.get_data_parallel_rank(), self._control.rank
        if rank == 0:
            print(f"cost model: {describe(inputs.costs)}", flush=True)
        client = PlanClient(store, keys, replica=replica, stage=self._stage, deadline_s=self._settings.timeout_s)
        for split in inputs.splits:
            self._iterators[split.name] = self._control.run_on_all(functools.partial(self._iterator, split, client))
        self._recorder = Recorder(
            folder=self._settings.report_folder,
            store=store,
            keys=keys,
            rank=rank,
            world_size=torch.distributed.get_world_size(),
            replica=replica,
            stage=self._stage,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            metrics=MetricsWriter(platform, interval=self._metrics_interval),
            maximum=_maximum(inputs),
            timeout_s=self._settings.timeout_s,
            learner=None
            if (rule := self._recalibration(inputs)) is None
            else PassLearner(rule, store, keys, rank=rank),
        )
        stack.callback(self._close_iterators)

    def counting(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """A model provider whose modules' memory the plans leave room for."""

        @functools.wraps(provider)
        def provide(*arguments: Any, **keywords: Any) -> Any:
            module = provider(*arguments, **keywords)
            self._modules.append(module)
            return module

        return provide

    def _with_model_state(self, inputs: PlanInputs) -> PlanInputs:
        """The inputs with the model state that was counted on every pipeline rank: the most of any replica's."""
        if self._state is None:
            return inputs
        mine = [parallel_state.get_pipeline_model_parallel_rank(), self._state.total(self._modules)]
        held = [0] * inputs.planner.pipeline_parallel
        for stage, size in (values.tolist() for values in self._control.gather(torch.tensor(mine))):
            held[stage] = max(held[stage], size)
        planner = msgspec.structs.replace(inputs.planner, model_state_bytes=tuple(held))
        return msgspec.structs.replace(inputs, planner=planner)

    def _check_samples(self, inputs: PlanInputs) -> None:
        """On rank 0: refuse samples that cannot be trained on before anything is started, and say what is left out."""
        if self._control.rank != 0:
            return
        for split in inputs.splits:
            sampler = Sampler(LengthTable.read(self._settings.data, split.name), split.sampler)
            if sampler.report.long_samples:
                print(f"{split.name}: {sampler.report}", flush=True)

    def _open_store(self, inputs: PlanInputs) -> tuple[PlanStore, PlanKeys]:
        """Start or find the store, start this node's planners, connect."""
        told = self._control.run_on_all(self._start_store)
        url, job, planners = self._control.broadcast_text(told).split()
        address = StoreAddress(url)
        keys = PlanKeys(job=job, settings_digest=inputs.digest())
        self._control.run_on_all(lambda: self._start_planners(address, keys, inputs, int(planners)))
        return self._control.run_on_all(lambda: self._resources.enter_context(open_store(address))), keys

    def _start_store(self) -> str:
        """On rank 0, the store's URL, this launch's name, and how many planners every node starts."""
        if self._control.rank != 0:
            return ""
        url = self._settings.store_url
        if url is None:
            log = self._settings.report_folder / "store.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            server = self._resources.enter_context(StoreServer(bind=self._settings.store_bind, log_path=log))
            url = server.address.url
        return f"{url} {new_job_name()} {self._settings.planners}"

    def _start_planners(self, address: StoreAddress, keys: PlanKeys, inputs: PlanInputs, planners: int) -> None:
        """On the first rank of each node."""
        if int(os.environ.get("LOCAL_RANK", "0")) != 0:
            return
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        node = self._control.rank // per_node
        nodes = torch.distributed.get_world_size() // per_node
        self._settings.report_folder.mkdir(parents=True, exist_ok=True)
        for planner in range(node * planners, (node + 1) * planners):
            service = ServiceSettings(
                store=address,
                job=keys.job,
                settings_digest=keys.settings_digest,
                node=planner,
                nodes=nodes * planners,
                look_ahead=self._settings.ahead,
                inputs=inputs,
                recalibration=self._recalibration(inputs),
            )
            log = self._settings.report_folder / f"planner-{planner}.log"
            self._resources.enter_context(PlannerProcess(service, log_path=log))

    def _recalibration(self, inputs: PlanInputs) -> Recalibration | None:
        """When the cost model is corrected, if it is to be."""
        if not inputs.recalibrate:
            return None
        return Recalibration(
            first_iteration=inputs.splits[0].first_iteration,
            look_ahead=self._settings.ahead,
            ranks=torch.distributed.get_world_size(),
        )

    def _iterator(self, split: SplitSettings, client: PlanClient) -> AgreedIterator:
        needs = self._make_needs()
        folder = Path(self._settings.data)
        collator = Collator(
            needs=needs, reader=open_split(folder, split.name) if needs.text else None, special=read_meta(folder)
        )
        stop = None if split.iterations is None else split.first_iteration + split.iterations
        planned = PlannedIterator(
            functools.partial(client.fetch, split.name),
            collator,
            start_iteration=split.first_iteration,
            stop_iteration=stop,
            ahead=max(self._settings.ahead // 2, 1),
            timeout_seconds=self._settings.timeout_s + 10,  # the fetch's own error is the better one
        )

        def announce(iteration: int) -> None:
            if self._control.rank == 0:
                client.announce(split.name, iteration)

        return AgreedIterator(planned, self._control, first_iteration=split.first_iteration, announce=announce)

    def _watchdog(self) -> Watchdog | None:
        """On CUDA; elsewhere a wait that expires raises where it is, with the instruction named."""
        if self._device.type != "cuda":
            return None
        watchdog = Watchdog(deadline_s=self._settings.timeout_s, name=f"rank {self._control.rank}")
        return self._resources.enter_context(watchdog)

    def _close_iterators(self) -> None:
        for iterator in self._iterators.values():
            with contextlib.suppress(StoreError):
                iterator.close()


def _maximum(inputs: PlanInputs) -> Shape:
    """What a run without planning would pad every sample to."""
    family, sampler = inputs.planner.family, inputs.splits[0].sampler
    return Shape(
        1, input_positions(family, sampler.max_input_length), target_positions(family, sampler.max_target_length)
    )


@contextlib.contextmanager
def process_groups() -> Iterator[None]:
    """Destroy the process groups that Megatron made, at the end of the block."""
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
