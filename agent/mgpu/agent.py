"""Puts the agent together from its parts, and runs its rounds.

What this node cannot do is left out and said: without eBPF there is no tracker `cuda`, the figures
are NVML's and nothing is enforced; without NVML there are no cards yet, and what is bound stays so.
"""

import threading
import time
from typing import Callable, Dict, List, Optional, Set

from mgpu import __version__, log
from mgpu.api import Api
from mgpu.cgroups import open_cgroups
from mgpu.cgroups.gate import Gate
from mgpu.check import NodeCheck
from mgpu.config import Config
from mgpu.containers import Containers
from mgpu.devices import Devices
from mgpu.errors import MgpuError, NotCapable
from mgpu.figures import Figures
from mgpu.httpd import HttpServer, Site
from mgpu.kernel import Kernel
from mgpu.ledger import Ledger, read_boot_id
from mgpu.metrics import Metrics
from mgpu.model import Enforcer, Kill, MemoryUse
from mgpu.native import NativeLimits
from mgpu.nodes import Nodes
from mgpu.ports import NodeFacts, Parts
from mgpu.probes.mappings import Mappings
from mgpu.probes.tracking import Tracking
from mgpu.processes import Processes
from mgpu.procevents import EXIT, LOST, ProcEvent, ProcEvents
from mgpu.reconcile import Reconciler
from mgpu.service import Service

VERIFY_EVERY_ROUNDS = 4
SWEEP_EVERY_ROUNDS = 10


class Agent:
    """Owns the parts; ``wake`` asks the loop for a round soon."""

    def __init__(self, config: Config, wake: Callable[[], None]) -> None:
        self._config = config
        self._wake = wake
        self._started_at_s = time.time()
        self._ledger = Ledger(config.state, read_boot_id(config.proc_root))
        self._devices = Devices()
        self._cgroups = open_cgroups(config.proc_root, config.cgroup_root)
        self._tracking = Tracking(config)
        self._gate = Gate(self._cgroups, self._tracking.gate_program)
        self._nodes = Nodes(
            config.dev_root,
            config.proc_root,
            config.node_owner,
            config.node_group,
            config.node_mode,
        )
        self._native = NativeLimits(self._devices, self._cgroups)
        self._kernel = Kernel(
            self._ledger,
            self._nodes,
            self._cgroups,
            self._gate,
            self._tracking,
            self._native,
            config.proc_root,
        )
        self._reconciler = Reconciler(
            self._ledger, self._devices, self._kernel, lambda: self._config
        )
        self._check = NodeCheck(
            self._tracking,
            self._devices,
            self._cgroups,
            self._native,
            config,
            lambda: self._facts().enforcer,
        )
        self._figures = Figures(
            self._ledger, self._devices, self._usage, self._facts, lambda: self._config
        )
        self._service = Service(
            self._figures,
            Parts(
                Containers(self._cgroups),
                self._cgroups,
                Processes(config.proc_root),
                self._reconciler.apply,
                self._check.rows,
            ),
        )
        self._api = Api(self._service)
        self._metrics = Metrics(self._figures)
        self._server: Optional[HttpServer] = None
        self._mappings: Optional[Mappings] = None
        self._events: Optional[ProcEvents] = None
        self._ended: Set[int] = set()
        self._ended_lock = threading.Lock()
        self._rounds = 0
        self._last_fault = ""

    def start(self) -> None:
        """Limits in force, then the doors open. Raises MgpuError where this node cannot serve.

        The doors are taken first: where somebody else has one, nothing is changed.
        """
        self._server = HttpServer(self._sites())
        self._ledger.forget_other_boots()
        self._tracking.start()
        self._check_simulation()
        self._check_native()
        self._reconciler.run()
        self._reconciler.charge_unseen()
        self._tracking.finish()
        self._remove_orphans()
        self._watch()
        self._server.start()

    def stop(self) -> None:
        """Close the doors. Everything in the kernel stays as it is."""
        if self._server is not None:
            self._server.stop()
        self._api.stop()
        self._metrics.stop()
        if self._events is not None:
            self._events.stop()
        if self._mappings is not None:
            self._mappings.stop()
        self._tracking.close()
        self._ledger.close()

    def reconfigure(self, config: Config) -> None:
        """Take the keys that a reload is enough for; they are in force when this returns."""
        self._config = config
        self._rounds = 0
        self.round(True)

    def summary(self) -> Dict[str, object]:
        """What the line that says "ready" tells."""
        facts = self._facts()
        return {
            "tracker": facts.tracker,
            "enforcer": facts.enforcer.value,
            "simulated": facts.simulated,
            "devices": len(self._figures.seen_cards()),
            "containers": len(self._ledger.containers()),
        }

    def round(self, full: bool) -> bool:
        """One round of the loop, ``full`` or of what was noted; False when something failed."""
        try:
            self._handle_ended()
            if full:
                self._service.release_vanished()
                self._reconciler.charge_unseen()
                if self._rounds % VERIFY_EVERY_ROUNDS == 0:
                    self._reconciler.run()
                if self._rounds % SWEEP_EVERY_ROUNDS == 0:
                    self._kernel.sweep()
                self._rounds += 1
            self._report_kills()
        except (MgpuError, OSError) as error:
            self._log_once(str(error))
            return False
        except Exception:
            log.fault("round-failed")
            return False
        self._last_fault = ""
        return True

    def teardown(self) -> List[str]:
        """Take every trace away; what was found, a line each."""
        containers = self._ledger.containers()
        found = self._kernel.teardown(containers)
        found += self._tracking.teardown()
        found += [f"cgroup {path}" for path in self._cgroups.remove_ours()]
        for container in containers:
            self._ledger.remove(container.container_id)
        self._ledger.close()
        return found

    # Parts of these

    def _log_once(self, fault: str) -> None:
        """A lasting fault is one line in the journal, not one every round."""
        if fault != self._last_fault:
            log.error("round-failed", why=fault)
        self._last_fault = fault

    def _facts(self) -> NodeFacts:
        cards = self._figures.seen_cards()
        numbers = self._kernel.numbers
        return NodeFacts(
            version=__version__,
            tracker=self._tracking.name,
            enforce=self._config.enforce,
            simulated=any(card.device.simulated for card in cards),
            card_major=None if numbers is None else numbers.card_major,
            started_at_s=self._started_at_s,
            native=self._native.missing() is None,
        )

    def _usage(self) -> Dict[int, MemoryUse]:
        return self._kernel.usage() if self._tracking.tables else self._reconciler.driver_usage()

    def _check_simulation(self) -> None:
        """``simulation = yes`` insists on simulated cards, ``no`` refuses them."""
        wanted = self._config.simulation
        simulated = [card.device.simulated for card in self._figures.seen_cards()]
        if wanted == "no" and any(simulated):
            raise NotCapable(
                "simulation = no", "NVML is the simulated one", "remove it from the library path"
            )
        if wanted == "yes" and not all(simulated):
            raise NotCapable(
                "simulation = yes", "NVML lists real cards", "put the simulated one before it"
            )

    def _check_native(self) -> None:
        """``enforce = native`` insists on the driver's own limits."""
        missing = self._native.missing()
        if self._config.enforce is Enforcer.NATIVE and missing is not None:
            raise NotCapable("enforce = native", *missing)

    def _remove_orphans(self) -> None:
        """Run cgroups that a crash left between their making and the ledger."""
        known = {container.cgroup.path for container in self._ledger.containers()}
        for path in self._cgroups.remove_ours(known):
            log.event("orphan-cgroup-removed", cgroup=path)

    def _watch(self) -> None:
        """Be told of mappings and of ends; where that cannot be, the rounds find out later."""
        if self._tracking.tracker is not None:
            self._mappings = Mappings(self._on_mapped, self._on_mappings_lost)
            try:
                self._mappings.start()
            except OSError as error:
                self._mappings = None
                log.warning("mappings-not-watched", why=error)
        self._events = ProcEvents(self._on_process)
        try:
            self._events.start()
        except (MgpuError, OSError) as error:
            self._events = None
            log.warning("processes-not-watched", why=error)

    def _sites(self) -> List[Site]:
        sites = [self._api.site(str(self._config.socket), self._config.group)]
        if self._config.metrics_listen is not None:
            sites.append(self._metrics.site(*self._config.metrics_listen))
        return sites

    def _on_mapped(self, pid: int, path: str) -> None:
        if self._tracking.is_library(path):
            self._kernel.mapped(pid, self._ledger.containers())

    def _on_mappings_lost(self) -> None:
        log.warning("mappings-lost")
        self._kernel.look_again()
        self._wake()

    def _on_process(self, event: ProcEvent) -> None:
        """Note whose end matters, and ask for a round. LOST: everybody may have ended."""
        if event.kind not in (EXIT, LOST):
            return
        lost = event.kind == LOST
        if lost or self._kernel.is_watched(event.pid):
            with self._ended_lock:
                self._ended |= self._kernel.watched() if lost else {event.pid}
            self._wake()

    def _handle_ended(self) -> None:
        with self._ended_lock:
            ended, self._ended = self._ended, set()
        if ended:
            self._kernel.ended(ended)
            self._service.release_vanished()

    def _report_kills(self) -> None:
        if self._tracking.tables is None:
            return
        for kill in self._tracking.tables.take_kills():
            self._report_kill(kill)

    def _report_kill(self, kill: Kill) -> None:
        holder = self._kernel.holder(kill.share_id)
        log.warning(
            "process-killed" if kill.killed else "over-limit-observed",
            container=holder.container,
            device=holder.device_index,
            pid=kill.pid,
            comm=kill.comm,
            asked_bytes=kill.asked_bytes,
            held_bytes=kill.held_bytes,
            used_bytes=kill.used_bytes,
            limit_bytes=kill.limit_bytes,
        )
