"""Which tracker and enforcer this node gets, by what it can do and what agent.conf asks for."""

from pathlib import Path
from typing import Dict, List, Optional, Tuple

from mgpu import log
from mgpu.bpf import kernel_version
from mgpu.config import Config
from mgpu.errors import NotCapable
from mgpu.fdstore import KeeperStore, SystemdStore
from mgpu.model import Enforcer
from mgpu.probes import capabilities, events
from mgpu.probes.attachments import Attachments, KeptEvents, PinnedLinks
from mgpu.probes.cuda import LIBRARY, CudaTracker
from mgpu.probes.libraries import host_libraries
from mgpu.probes.loader import Loader
from mgpu.probes.tables import Tables
from mgpu.probes.tracepoints import Tracepoints
from mgpu.sdnotify import ServiceManager

LINKS_SINCE = (5, 15)  # BPF_LINK_CREATE on perf events
INSTALLED_SOURCE = Path("/usr/share/mgpu/bpf")
CHECKOUT_SOURCE = Path(__file__).resolve().parents[3] / "bpf"
KEEPER_SOCKET = "keeper.sock"


class Tracking:
    """``tables`` and ``tracker`` are None where this node has no eBPF for them; see ``reason``."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tracepoints = Tracepoints()
        self._loader = Loader(
            config.bpf_root,
            config.bpf_source or _source(),
            config.run_dir,
            self._tracepoints,
        )
        self.tables: Optional[Tables] = None
        self.tracker: Optional[CudaTracker] = None
        self.reason: Optional[NotCapable] = None
        self._obsolete: List[Attachments] = []

    @property
    def name(self) -> str:
        """The tracker's name: ``cuda`` or ``nvml``."""
        return "cuda" if self.tracker is not None else "nvml"

    def start(self) -> None:
        """Programs and maps in the kernel, tracepoints attached.

        Raises NotCapable where agent.conf insists on what this node cannot do.
        """
        try:
            compiled = self._loader.ensure()
            self.tables = Tables(self._loader)
            if self._config.tracker != "nvml":
                self._start_tracker()
        except NotCapable as error:
            self.reason = error
            if self._config.tracker == "cuda" or self._config.enforce is Enforcer.KILL:
                raise
            log.warning("tracker-not-possible", tracker="cuda", why=error)
        else:
            log.event("programs-ready", compiled=compiled)

    def finish(self) -> None:
        """Everything is in the maps and attached: take what other versions left away."""
        self._keep()
        if self.tracker is not None:
            self.tracker.finish()
        for way in self._obsolete:
            way.clear()
        self._obsolete = []
        if self.tables is not None:
            self._loader.retire()

    def mend(self) -> bool:
        """Attach again what has gone without us; True: the processes' libraries are to be too."""
        if self.tracker is None or not self.tracker.lost():
            return False
        self.tracker.renew()
        self._keep()
        self.tracker.finish()
        return True

    def gate_program(self) -> int:
        """The device gate's program. Raises NotCapable where there is none."""
        if self.tables is None:
            raise self.reason or NotCapable("device gate", "not loaded", "start the agent")
        return self._loader.program("mgpu_gate")

    def is_library(self, path: str) -> bool:
        return LIBRARY.search(path) is not None

    def close(self) -> None:
        """Let go; everything stays in the kernel."""
        self._loader.close()

    def teardown(self) -> List[str]:
        """Take probes, programs and maps away; what was found."""
        found = []
        root = self._config.bpf_root
        if root.is_dir():
            found.append(f"programs and maps in {root}")
        KeeperStore(self._config.run_dir / KEEPER_SOCKET).clear()
        self._loader.teardown()
        return found

    def _keep(self) -> None:
        """Probe the host's own libcuda, whoever uses it."""
        if self.tracker is not None:
            self.tracker.keep(self._config.libcuda_paths or host_libraries())

    def _start_tracker(self) -> None:
        if not events.supported():
            raise NotCapable(
                "tracker cuda",
                "this kernel has no uprobes",
                "use one with CONFIG_UPROBE_EVENTS, or tracker = nvml",
            )
        capabilities.require_return_probes(kernel_version())
        kept, others = self._attachments()
        tracker = CudaTracker(self._loader, kept, self._tracepoints, self._config.proc_root)
        if any(other.names() for other in others):
            log.warning("attachments-moved", note="counting pauses until all are attached anew")
            tracker.renew()
            self._obsolete = others
        else:
            tracker.start()
        self.tracker = tracker

    def _attachments(self) -> Tuple[Attachments, List[Attachments]]:
        """The way to keep attachments, and the other ways, which an earlier agent may have used."""
        manager = ServiceManager()
        links = PinnedLinks(self._config.bpf_root / "links")
        systemd = KeptEvents(SystemdStore(manager))
        keeper = KeeperStore(self._config.run_dir / KEEPER_SOCKET)
        ways: Dict[str, Attachments] = {"link": links, "systemd": systemd}
        if keeper.is_running():
            ways["keeper"] = KeptEvents(keeper)
        wanted = self._config.attachments
        if wanted == "auto":
            wanted = "link" if kernel_version() >= LINKS_SINCE else "fds"
        if wanted == "fds":
            wanted = "systemd" if manager.stores_fds else "keeper"
        kept = ways.pop(wanted, None) or KeptEvents(keeper)
        return kept, list(ways.values())


def _source() -> Path:
    return CHECKOUT_SOURCE if CHECKOUT_SOURCE.is_dir() else INSTALLED_SOURCE
