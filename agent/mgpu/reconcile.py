"""Makes the kernel agree with the ledger. Idempotent; runs at start, on change, and on a timer.

Everything here is derived from the ledger, the cards and what exists: every container gets its
nodes, its counters, its gate and its entry in the maps, in the order that never leaves it without
a limit; what belongs to nobody is taken away. A crash at any point is repaired by the next run.
"""

import contextlib
import threading
from dataclasses import replace
from typing import Callable, Dict, List, Optional, Sequence, Set

from mgpu import log
from mgpu.config import Config
from mgpu.devices import Card, Devices
from mgpu.errors import MgpuError, NotCapable
from mgpu.kernel import Kernel
from mgpu.ledger import Ledger
from mgpu.model import Container, Device, MemoryUse, PidUse
from mgpu.unseen import ProcessShare, unseen_bytes


class Reconciler:
    """One run at a time: the API's threads and the daemon's loop share one lock."""

    def __init__(
        self, ledger: Ledger, devices: Devices, kernel: Kernel, config: Callable[[], Config]
    ) -> None:
        self._ledger = ledger
        self._devices = devices
        self._kernel = kernel
        self._config = config
        self._lock = threading.RLock()
        self._failing: Set[str] = set()
        self._unseen: Optional[Dict[ProcessShare, int]] = None
        self._first = True

    def run(self) -> None:
        """Make everything agree. A container that cannot be mended is logged, the rest go on."""
        with self._lock:
            containers = self._prepare()
            if self._first:
                self._take_over(containers)
            for container in containers:
                try:
                    self._kernel.bind(container, self._config())
                    self._failing.discard(container.container_id)
                except (MgpuError, OSError) as error:
                    self._log_once(container, error)
            self._kernel.drop_strangers(containers)
            self._kernel.guard(self._config().guard)
            if self._first:
                self._kernel.open_strange_gates(containers)
                self._first = False
            self._kernel.follow(containers)

    def apply(self, container_id: Optional[str]) -> None:
        """Make one container's state real, or take it away when the ledger has it no more.

        Raises MgpuError or OSError where that cannot be done. None: nothing but what concerns all.
        """
        with self._lock:
            containers = self._prepare()
            ours = [c for c in containers if c.container_id == container_id]
            for container in ours:
                self._kernel.bind(container, self._config())
            self._kernel.drop_strangers(containers)
            self._kernel.follow(ours)

    def charge_unseen(self) -> None:
        """Charge what the driver reports of bound processes beyond what the tracker counted."""
        with self._lock:
            before = self._kernel.tracked()
            try:
                cards = self._devices.fresh_cards()
            except NotCapable:
                return  # NVML has never answered: nothing to compare with
            containers = self._ledger.containers()
            driver = self._by_share(cards, containers)
            after = self._kernel.tracked()
            last = self._kernel.unseen() if self._unseen is None else self._unseen
            self._unseen = unseen_bytes(before, driver, after, last)
            self._kernel.set_unseen(self._unseen)

    def driver_usage(self) -> Dict[int, MemoryUse]:
        """Figures by share from the driver alone, for a node without a tracker of its own."""
        containers = self._ledger.containers()
        pids: Dict[int, List[PidUse]] = {}
        for (pid, share_id), nbytes in self._by_share(self._devices.cards(), containers).items():
            pids.setdefault(share_id, []).append(PidUse(pid, 0, nbytes))
        return {
            instance.share_id: MemoryUse(
                instance.share_id,
                instance.vmem_limit_bytes,
                sum(use.unseen_bytes for use in pids.get(instance.share_id, ())),
                pids=tuple(pids.get(instance.share_id, ())),
            )
            for container in containers
            for instance in container.instances
        }

    def _take_over(self, containers: Sequence[Container]) -> None:
        """Fill the maps, which may be new, before gates and probes of an older agent go.

        Whoever is bound keeps his cards and his limit meanwhile. Faults are ``bind``'s to report.
        """
        for container in containers:
            with contextlib.suppress(MgpuError, OSError):
                self._kernel.limit(container, self._config())
        self._kernel.follow(containers)

    def _prepare(self) -> List[Container]:
        """What concerns all containers: the nodes, and the numbers in the maps."""
        cards = self._inventory()
        containers = _with_current_index(self._ledger.containers(), cards)
        self._kernel.prepare(cards, containers, self._config())
        return containers

    def _inventory(self) -> Sequence[Device]:
        """The cards; none while NVML has never answered: what is bound stays bound meanwhile."""
        try:
            return self._devices.inventory()
        except NotCapable:
            return ()

    def _by_share(
        self, cards: Sequence[Card], containers: Sequence[Container]
    ) -> Dict[ProcessShare, int]:
        """The driver's figures of the processes that sit in a bound cgroup."""
        found: Dict[ProcessShare, int] = {}
        share_of = {
            (c.container_id, i.device_uuid): i.share_id for c in containers for i in c.instances
        }
        for card in cards:
            for pid, nbytes in (card.process_bytes or {}).items():
                holder = self._kernel.container_of(pid, containers)
                share_id = share_of.get((holder, card.device.uuid)) if holder else None
                if share_id is not None:
                    found[(pid, share_id)] = nbytes
        return found

    def _log_once(self, container: Container, error: Exception) -> None:
        """A lasting fault is one line in the journal, not one every few seconds."""
        if container.container_id not in self._failing:
            self._failing.add(container.container_id)
            log.error("reconcile-failed", container=container.short_id, why=error)


def _with_current_index(
    containers: Sequence[Container], cards: Sequence[Device]
) -> List[Container]:
    """The containers with the index that each card has now: only its UUID stays for ever."""
    index_of = {card.uuid: card.index for card in cards}
    return [
        replace(
            container,
            instances=tuple(
                replace(i, device_index=index_of.get(i.device_uuid, i.device_index))
                for i in container.instances
            ),
        )
        for container in containers
    ]
