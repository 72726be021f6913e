"""Where a rank's plans come from: the store, the planners that fill it, the iterators that read it.

rank 0             starts the store, or finds the one it was given, and names the launch
first of a node    starts the node's planner processes
every rank         connects, and prefetches its share of every split's iterations
"""

import contextlib
import functools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch

from megatron_dynapipe.data.collate import Collator, Needs
from megatron_dynapipe.data.iterator import PlannedIterator
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.integration.flags.arguments import RunSettings
from megatron_dynapipe.integration.supply.agreed_iterator import AgreedIterator
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.client import PlanClient
from megatron_dynapipe.service.process import PlannerProcess
from megatron_dynapipe.service.recalibration import Recalibration
from megatron_dynapipe.service.settings import PlanInputs, ServiceSettings, SplitSettings
from megatron_dynapipe.store import PlanKeys, PlanStore, StoreAddress, StoreServer, new_job_name, open_store


class PlanSupply:
    """Context manager: plans arrive for as long as the block lasts. Every rank enters it, in the same order.

    Args:
        settings: store, planners, deadlines.
        control: the group on which ranks agree; a failure to start on one is raised on all.
        inputs: what plans are made from.

    Attributes:
        store: connected, once the block has been entered.
        keys: names of this launch's plans in it.
        recalibration: when the cost model is corrected, if it is to be.
    """

    store: PlanStore
    keys: PlanKeys

    def __init__(self, settings: RunSettings, control: ControlGroup, inputs: PlanInputs) -> None:
        self._settings = settings
        self._control = control
        self._inputs = inputs
        self._resources = ExitStack()
        self.recalibration = self._recalibration()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._resources)
            url, job, planners = self._control.broadcast_text(self._control.run_on_all(self._start_store)).split()
            address = StoreAddress(url)
            self.keys = PlanKeys(job=job, settings_digest=self._inputs.digest())
            self._control.run_on_all(lambda: self._start_planners(address, int(planners)))
            self.store = self._control.run_on_all(lambda: self._resources.enter_context(open_store(address)))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def iterator(self, split: SplitSettings, *, needs: Needs, replica: int, stage: int) -> AgreedIterator:
        """One split's iterations for (replica, stage), prefetched until the block ends."""
        return self._control.run_on_all(functools.partial(self._iterator, split, needs, replica, stage))

    def _iterator(self, split: SplitSettings, needs: Needs, replica: int, stage: int) -> AgreedIterator:
        timeout_s, folder = self._settings.timeout_s, Path(self._settings.data)
        client = PlanClient(self.store, self.keys, replica=replica, stage=stage, deadline_s=timeout_s)
        reader = open_split(folder, split.name) if needs.text else None
        planned = PlannedIterator(
            functools.partial(client.fetch, split.name),
            Collator(needs=needs, reader=reader, special=read_meta(folder)),
            start_iteration=split.first_iteration,
            stop_iteration=None if split.iterations is None else split.first_iteration + split.iterations,
            ahead=max(self._settings.ahead // 2, 1),
            timeout_seconds=timeout_s + 10,  # the fetch's own error is the better one
        )

        def announce(iteration: int) -> None:
            if self._control.rank == 0:
                client.announce(split.name, iteration)

        self._resources.callback(_close, planned)
        return AgreedIterator(planned, self._control, first_iteration=split.first_iteration, announce=announce)

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

    def _start_planners(self, address: StoreAddress, planners: int) -> None:
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
                job=self.keys.job,
                settings_digest=self.keys.settings_digest,
                node=planner,
                nodes=nodes * planners,
                look_ahead=self._settings.ahead,
                inputs=self._inputs,
                recalibration=self.recalibration,
            )
            log = self._settings.report_folder / f"planner-{planner}.log"
            self._resources.enter_context(PlannerProcess(service, log_path=log))

    def _recalibration(self) -> Recalibration | None:
        if not self._inputs.recalibrate:
            return None
        return Recalibration(
            first_iteration=self._inputs.splits[0].first_iteration,
            look_ahead=self._settings.ahead,
            ranks=torch.distributed.get_world_size(),
        )


def _close(iterator: PlannedIterator) -> None:
    with contextlib.suppress(StoreError):
        iterator.close()
