"""The sources of a rank's plans: the store, the planners that fill it, the iterators that read it.

rank 0             starts the store, or finds the one it was given, and names the launch
first of a node    starts the node's planner process; fetches the plans of all ranks of the node, or makes them where
                   they are late, and hands them on
every rank         prefetches its share of every split's iterations
"""

import contextlib
import functools
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from megatron_dynapipe.core.errors import PlanError, PlannerFailedError, StoreError
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.data.iterator import PlannedIterator, pinning
from megatron_dynapipe.data.meta import open_split, read_meta, task_ids_of
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.flags import machine
from megatron_dynapipe.megatron.flags.run_config import Sources
from megatron_dynapipe.megatron.supply.agreement import AgreedIterator
from megatron_dynapipe.megatron.supply.node import NodeGroup
from megatron_dynapipe.outputs import warn
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.sampling import Cutter, SpanTable
from megatron_dynapipe.service.corrections import Correction
from megatron_dynapipe.service.process import PlannerProcess
from megatron_dynapipe.service.settings import LEAST_AHEAD, PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.service.source import PlanSource
from megatron_dynapipe.store import (
    REPLY_TIMEOUT_S,
    RETENTION_S,
    PlanKeys,
    StoreAddress,
    StoreServer,
    new_job_name,
    open_store,
)
from megatron_dynapipe.store.codec import decode_entry
from megatron_dynapipe.store.entry import StageEntry

_GAIN_S = 15.0
"""How long the end of a run that is over before its planner has compared the first plan waits for it."""
_Launch = tuple[StoreAddress, str, int | None]
"""Rank 0 tells all ranks where plans are, over the control group alone, for the sake of the password; this launch's
name; how many seconds a key stays that nobody deletes, None for ever."""


class PlanSupply:
    """Context manager: plans arrive for as long as the block lasts. Every rank enters it, in the same order.

    `control` is the group on which ranks agree: a failure to start on one is raised on all. Micro-batches are made
    ready for `device`; `replica` and `stage` are this rank's.
    """

    def __init__(
        self,
        sources: Sources,
        control: ControlGroup,
        inputs: PlanInputs,
        *,
        device: torch.device,
        replica: int,
        stage: int,
    ) -> None:
        self._device = device
        self._place = (replica, stage)
        self._sources = sources
        self._control = control
        self._inputs = inputs
        self._least_ahead = sources.ahead or LEAST_AHEAD
        self._ahead = max(self._least_ahead // 2, 1)
        self._resources = ExitStack()
        self._source: PlanSource | None = None
        self._planner: PlannerProcess | None = None

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._resources)
            row = torch.tensor([int(os.environ.get("LOCAL_RANK", "0")), *self._place])
            rows = [row.tolist() for row in self._control.gather(row)]
            self._places = [(replica, stage) for _, replica, stage in rows]
            firsts = [local == 0 for local, _, _ in rows]
            timeout_s = self._sources.timeout_s + 10  # the first rank's own error is the better one
            self._node = NodeGroup(self._control.rank, firsts, timeout_s=timeout_s)
            text = self._control.broadcast_text(self._control.run_on_all(self._start_store))
            launch = msgspec.json.decode(text, type=_Launch)
            self._control.run_on_all(lambda: self._start_planners(launch))
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:  # Megatron's end before --train-iters
            kind = error = trace = None
        self._resources.__exit__(kind, error, trace)

    def said_at_the_end(self) -> str:
        """What planners say of a run: of this node's cores, how many keep up, what plans gain over packed rows."""
        if self._planner is None:
            return ""
        gain = b""
        timeout_s = _GAIN_S if self._planner.status is None else 0.1  # what has ended has published it, or never will
        with contextlib.suppress(StoreError):  # of a run that ends before the planner has compared them
            _, gain = self._store.wait_any([self._keys.gain], timeout_s=timeout_s, what="what plans gain")
        return "\n".join(filter(None, [f"planning: {self._planner.load} of this node", gain.decode()]))

    def planned_ahead(self) -> int:
        """How many iterations planners are ahead of training; every rank calls it."""
        ahead = [self._least_ahead]
        if self._control.rank == 0:
            with contextlib.suppress(StoreError):  # nobody can be told what depends on it
                ahead += self._store.read_progress([self._keys.ahead]).values()
        return int(self._control.broadcast_text(str(max(ahead))))

    def correct(self, correction: Correction) -> bool:
        """Plan with corrected costs from an iteration on that nobody has asked for; every rank calls it.

        Returns whether planners can know them: without them, costs stay as they are.
        """
        told = self._control.rank == 0 and self._source is not None and self._source.publish(correction)
        if self._control.broadcast_text("told" if told else "") != "told":
            return False
        if self._source is not None:
            self._source.correct(correction)
        return True

    def iterator(self, split: SplitSettings, *, required: RequiredFields) -> AgreedIterator:
        """One split's iterations for this rank, prefetched until the block ends."""
        return self._control.run_on_all(functools.partial(self._iterator, split, required))

    def _iterator(self, split: SplitSettings, required: RequiredFields) -> AgreedIterator:
        folder = Path(self._inputs.data_folder)
        tag = self._inputs.splits.index(split)
        reader = open_split(folder, split.name, split.sampler.family) if required.text else None
        meta = read_meta(folder)
        by_task = required.labels and len(meta.tasks) > 1
        tasks = None
        if by_task or (required.text and split.sampler.needs_tasks):
            tasks = task_ids_of(folder, split.name, meta.split_samples[split.name], meta)
        planned = PlannedIterator(
            functools.partial(self._fetch, split, tag),
            Collator(
                required=required,
                reader=reader,
                special=meta,
                batch_layouts=self._inputs.planner.micro_batch_layouts,
                loss_on=self._sources.loss_on or LossOn(meta.loss),
                cutter=Cutter(split.sampler.family, split.sampler.sides, SpanTable.read(folder / split.name), tasks),
                task_ids=tasks if by_task else None,
                length_multiple=self._inputs.planner.length_multiple,
            ),
            start_iteration=split.first_iteration,
            stop_iteration=None if split.iterations is None else split.first_iteration + split.iterations,
            ahead=self._ahead,
            timeout_seconds=self._sources.timeout_s + 10,  # the fetch's own error is the better one
            prepare=pinning(self._device),
        )
        self._resources.callback(self._end, planned, tag)
        return AgreedIterator(planned, self._control, first_iteration=split.first_iteration)

    def _fetch(self, split: SplitSettings, tag: int, iteration: int) -> StageEntry:
        """The part of an iteration's plan that is this rank's; the first rank of a node hands the others theirs on."""
        expected = iteration, *self._place
        if self._source is None:
            data = self._node.receive(tag)
        else:
            if self._control.rank == 0:  # what is ready ahead has been fetched
                self._source.announce(split.name, max(iteration - self._ahead, split.first_iteration))
            try:
                entries = self._source.fetch(split.name, iteration, [self._places[rank] for rank in self._node.ranks])
            except PlannerFailedError as error:
                self._node.fail(tag, error)
                raise
            self._node.give(tag, {rank: entries[self._places[rank]] for rank in self._node.ranks})
            data = entries[self._place]
        entry = decode_entry(data)
        if (actual := (entry.iteration, entry.replica, entry.stage_plan.stage)) != expected:
            raise PlanError(f"expected the plan of (iteration, replica, stage) {expected}, got {actual}")
        return entry

    def _end(self, planned: PlannedIterator, tag: int) -> None:
        """End the thread that reads ahead, and let the node's other ranks wait for this one no longer."""
        if self._source is not None:
            self._source.close()
        planned.close()
        if self._source is not None:
            self._node.end(tag)  # after its thread has sent its last

    def _start_store(self) -> str:
        """On rank 0, start the store or find it; the launch, encoded."""
        if self._control.rank != 0:
            return ""
        address = self._sources.store
        retention_s: int | None = RETENTION_S
        if address is None:
            retention_s = None  # the job's own server ends with it
            log = self._sources.report_folder / "store.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            address = self._resources.enter_context(StoreServer(bind=self._sources.store_bind, log_path=log)).address
        launch: _Launch = (address, new_job_name(), retention_s)
        return msgspec.json.encode(launch).decode()

    def _start_planners(self, launch: _Launch) -> None:
        """On the first rank of each node: connect, and start the node's planner."""
        if not self._node.is_first:
            return
        run, (address, job, retention_s) = self._sources, launch
        self._keys = keys = PlanKeys(job=job, settings_digest=self._inputs.digest())
        reply_timeout_s = min(REPLY_TIMEOUT_S, run.timeout_s / 2)
        store = open_store(address, retention_s=retention_s, reply_timeout_s=reply_timeout_s)
        self._store = self._resources.enter_context(store)
        run.report_folder.mkdir(parents=True, exist_ok=True)
        node = machine.node_of(self._control.rank)
        service = ServiceSettings(
            store=address,
            job=job,
            settings_digest=keys.settings_digest,
            planner=node,
            planners=machine.nodes(),
            cores=run.planner_cores or machine.spare_cores(),
            look_ahead=run.ahead,
            retention_s=retention_s,
            inputs=self._inputs,
        )
        self._planner = PlannerProcess(service, log_path=run.report_folder / f"planner-{node}.log")
        self._resources.enter_context(self._planner)
        self._source = PlanSource(
            self._inputs,
            store,
            keys,
            who=f"rank {self._control.rank}",
            deadline_s=run.timeout_s,
            planners=machine.nodes(),
            node=node,
            may_come=lambda: self._planner is None or self._planner.status is None,
            say=warn,
        )
