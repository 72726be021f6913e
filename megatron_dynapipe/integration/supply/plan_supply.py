"""Where a rank's plans come from: the store, the planners that fill it, the iterators that read it.

rank 0             starts the store, or finds the one it was given, and names the launch
first of a node    starts the node's planner processes, the first of which is on rank 0's node
every rank         connects, and prefetches its share of every split's iterations
"""

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.iterator import PlannedIterator, pinning
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.data.spans import LossOn, SpanTable
from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.integration.flags import machine
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.supply.agreement import AgreedIterator
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import read_task_ids
from megatron_dynapipe.service.client import PlanClient, Republisher
from megatron_dynapipe.service.process import NodePlanners
from megatron_dynapipe.service.settings import PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import PlanKeys, PlanStore, StoreAddress, StoreServer, new_job_name, renewed_keys
from megatron_dynapipe.store.redis_store import RETENTION_S

_LATE_S = 20.0
"""How long rank 0 waits for a plan before it takes the planners at work for hanging."""
_PATIENCE_S = 60.0
"""How long a store may be out of reach: a server starts again within seconds, a link comes back within a minute."""
_RESTARTS = 3
"""Of a server of the run's own that was killed."""


class _Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells all ranks.

    Attributes:
        store: where plans are; its password goes over the control group alone.
        job: this launch's name.
        retention_s: how long a key stays that nobody renews or deletes; None keeps all.
    """

    store: StoreAddress
    job: str
    retention_s: int | None


class PlanSupply:
    """Context manager: plans arrive for as long as the block lasts. Every rank enters it, in the same order.

    Args:
        settings: store, planners, deadlines.
        control: the group on which ranks agree; a failure to start on one is raised on all.
        inputs: what plans are made from.
        device: of this rank, for which micro-batches are made ready.

    Attributes:
        store: connected, once the block has been entered.
        keys: names of this launch's plans in it.
    """

    store: PlanStore
    keys: PlanKeys

    def __init__(self, settings: RunConfig, control: ControlGroup, inputs: PlanInputs, *, device: torch.device) -> None:
        self._device = device
        self._settings = settings
        self._control = control
        self._inputs = inputs
        self._resources = ExitStack()
        self._start_stand_in: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._resources)
            text = self._control.broadcast_text(self._control.run_on_all(self._start_store))
            launch = msgspec.json.decode(text, type=_Launch)
            self.keys = PlanKeys(job=launch.job, settings_digest=self._inputs.digest())
            service = self._service_settings(launch)
            self.store = self._control.run_on_all(lambda: self._open(service))
            topic = self.keys.progress(self._inputs.splits[0].name)
            self.republisher = self._resources.enter_context(Republisher(self.store, topic))
            self._control.run_on_all(lambda: self._start_planners(service))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:  # Megatron's end before --train-iters
            kind = error = trace = None
        self._resources.__exit__(kind, error, trace)

    def iterator(self, split: SplitSettings, *, required: RequiredFields, replica: int, stage: int) -> AgreedIterator:
        """One split's iterations for (replica, stage), prefetched until the block ends."""
        return self._control.run_on_all(functools.partial(self._iterator, split, required, replica, stage))

    def _iterator(self, split: SplitSettings, required: RequiredFields, replica: int, stage: int) -> AgreedIterator:
        timeout_s, folder = self._settings.timeout_s, Path(self._settings.data)
        client = PlanClient(
            self.store,
            self.keys,
            replica=replica,
            stage=stage,
            deadline_s=timeout_s,
            late_s=_LATE_S if self._control.rank == 0 else float("inf"),
            on_late=self._start_stand_in,
        )
        reader, meta = open_split(folder, split.name) if required.text else None, read_meta(folder)
        by_task = split.forward_only and required.labels and len(meta.tasks) > 1
        planned = PlannedIterator(
            functools.partial(client.fetch, split.name),
            Collator(
                required=required,
                reader=reader,
                special=meta,
                layouts=self._inputs.planner.micro_batch_layouts,
                truncate=self._settings.truncate,
                loss_on=self._settings.loss_on or LossOn(meta.loss),
                spans=SpanTable.read(folder / split.name),
                task_ids=read_task_ids(folder, split.name, meta.split_samples[split.name]) if by_task else None,
            ),
            start_iteration=split.first_iteration,
            stop_iteration=None if split.iterations is None else split.first_iteration + split.iterations,
            ahead=max(self._settings.ahead // 2, 1),
            timeout_seconds=timeout_s + 10,  # the fetch's own error is the better one
            prepare=pinning(self._device),
        )

        def announce(iteration: int) -> None:
            if self._control.rank == 0:
                client.announce(split.name, iteration)
                self.republisher.keep_progress(self.keys.progress(split.name), iteration)

        self._resources.callback(_close, planned)
        return AgreedIterator(planned, self._control, first_iteration=split.first_iteration, announce=announce)

    def _start_store(self) -> str:
        """On rank 0, what every rank must know of this launch."""
        if self._control.rank != 0:
            return ""
        address = self._settings.store
        if is_own := address is None:
            log = self._settings.report_folder / "store.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            server = StoreServer(bind=self._settings.store_bind, log_path=log, restarts=_RESTARTS)
            address = self._resources.enter_context(server).address
        launch = _Launch(store=address, job=new_job_name(), retention_s=None if is_own else RETENTION_S)
        return msgspec.json.encode(launch).decode()

    def _open(self, service: ServiceSettings) -> PlanStore:
        """Connect; on rank 0, keep the job's keys on a server that others share."""
        store = self._resources.enter_context(service.open_store())
        if service.retention_s is not None:
            if self._control.rank == 0:
                self._resources.enter_context(renewed_keys(store, self.keys.job))
                if warning := store.eviction_warning():
                    print(f"warning: {warning}", flush=True)
            self._resources.push(self._await_all_planners_ends)
        return store

    def _await_all_planners_ends(self, kind: type[BaseException] | None, *_: object) -> None:
        """Before the keys are deleted: no planner of any node publishes more."""
        if kind is None:
            with contextlib.suppress(RuntimeError):  # another rank has failed, and is gone
                self._control.gather(torch.zeros(1))

    def _service_settings(self, launch: "_Launch") -> ServiceSettings:
        return ServiceSettings(
            store=launch.store,
            job=launch.job,
            settings_digest=self.keys.settings_digest,
            planners=self._settings.planners,
            look_ahead=self._settings.ahead,
            retention_s=launch.retention_s,
            reply_timeout_s=self._settings.timeout_s,
            patience_s=min(self._settings.timeout_s / 2, _PATIENCE_S),
            full_timeout_s=self._settings.timeout_s / 2,
            inputs=self._inputs,
        )

    def _start_planners(self, service: ServiceSettings) -> None:
        """On the first rank of each node."""
        if int(os.environ.get("LOCAL_RANK", "0")) != 0:
            return
        self._settings.report_folder.mkdir(parents=True, exist_ok=True)
        planners = NodePlanners(
            service,
            node=machine.node_of(self._control.rank),
            nodes=machine.nodes(),
            log_folder=self._settings.report_folder,
        )
        self._start_stand_in = self._resources.enter_context(planners).start_stand_in


def _close(iterator: PlannedIterator) -> None:
    with contextlib.suppress(StoreError):
        iterator.close()
