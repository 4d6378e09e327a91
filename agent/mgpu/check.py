"""What this node can do: every tracker, enforcer and part of the gate, and what is missing."""

from typing import Callable, Dict, List, Optional, Tuple

from mgpu.bpf import kernel_version
from mgpu.cgroups import Cgroups
from mgpu.config import Config
from mgpu.devices import Devices
from mgpu.errors import MgpuError, NotCapable
from mgpu.model import Enforcer
from mgpu.native import NativeLimits
from mgpu.probes import events
from mgpu.probes.tracking import LINKS_SINCE, Tracking

Row = Dict[str, object]
Answer = Optional[Tuple[str, str]]  # (reason, remedy); None: it can be done

LATER = ("not in this version", "use one that is available")


class NodeCheck:
    """Answers from the parts of a running agent, which have tried for themselves."""

    def __init__(
        self,
        tracking: Tracking,
        devices: Devices,
        cgroups: Cgroups,
        native: NativeLimits,
        config: Config,
        in_force: Callable[[], Enforcer],
    ) -> None:
        self._tracking = tracking
        self._devices = devices
        self._cgroups = cgroups
        self._native = native
        self._config = config
        self._in_force = in_force

    def rows(self) -> List[Row]:
        """One row for each thing; ``in_use`` says that this agent uses it now."""
        tracker = self._tracking.name
        nvml = self._nvml()
        ebpf = self._ebpf()
        cuda = ebpf or self._uprobes()
        kill = cuda if tracker == "nvml" else None
        enforcer = self._in_force()
        links = self._links()
        return [
            _row("cards", "nvml", nvml, nvml is None),
            _row("cards", "simulated", self._simulated(), self._simulated() is None),
            _row("gate", "cgroup v2", self._gate_v2(ebpf), self._gate_v2(ebpf) is None),
            _row("gate", "cgroup v1", self._gate_v1(), self._gate_v1() is None),
            _row("tracker", "rm", LATER, False),
            _row("tracker", "cuda", cuda, tracker == "cuda"),
            _row("tracker", "nvml", nvml, tracker == "nvml"),
            _row("enforcer", "native", self._native.missing(), enforcer is Enforcer.NATIVE),
            _row("enforcer", "rewrite", LATER, False),
            _row("enforcer", "lsm", LATER, False),
            _row("enforcer", "kill", kill, enforcer is Enforcer.KILL),
            _row("enforcer", "observe", None, enforcer is Enforcer.OBSERVE),
            _row("attachments", "link", links, tracker == "cuda" and self._uses_links(links)),
            _row("attachments", "fds", None, tracker == "cuda" and not self._uses_links(links)),
        ]

    def _nvml(self) -> Answer:
        try:
            self._devices.cards()
        except NotCapable as error:
            return error.reason, error.remedy
        return None

    def _simulated(self) -> Answer:
        try:
            cards = self._devices.cards()
        except MgpuError:
            cards = ()
        if any(card.device.simulated for card in cards):
            return None
        return "the cards are not simulated ones", "nothing to do: this is what a node wants"

    def _ebpf(self) -> Answer:
        reason = self._tracking.reason
        return None if reason is None else (f"{reason.asked}: {reason.reason}", reason.remedy)

    def _uprobes(self) -> Answer:
        if events.supported():
            return None
        return "this kernel has no uprobes", "use one with CONFIG_UPROBE_EVENTS"

    def _gate_v2(self, ebpf: Answer) -> Answer:
        if self._cgroups.unified is None:
            return "no cgroup2 hierarchy is mounted", "mount cgroup2, or rely on the v1 controller"
        return ebpf

    def _gate_v1(self) -> Answer:
        if self._cgroups.devices is None:
            return "the v1 devices controller is not mounted", "nothing to do where cgroup2 is"
        return None

    def _links(self) -> Answer:
        if kernel_version() >= LINKS_SINCE:
            return None
        wanted = ".".join(map(str, LINKS_SINCE))
        return f"the kernel is older than {wanted}", "nothing to do: fds serve as well"

    def _uses_links(self, links: Answer) -> bool:
        wanted = self._config.attachments
        return wanted == "link" or (wanted == "auto" and links is None)


def _row(kind: str, name: str, answer: Answer, in_use: bool) -> Row:
    reason, remedy = answer or ("", "")
    return {
        "kind": kind,
        "name": name,
        "available": answer is None,
        "in_use": in_use,
        "reason": reason,
        "remedy": remedy,
    }
