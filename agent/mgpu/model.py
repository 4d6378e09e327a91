"""The words of mgpu as frozen values: no I/O, no behaviour beyond arithmetic on themselves."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Optional, Tuple

MIB = 1024 * 1024
MAX_INSTANCES_PER_DEVICE = 16
MAX_CARDS_PER_CONTAINER = 8


class Policy(IntEnum):
    """compute_policy of a device, numbered as mGPU numbers it."""

    FIXED_SHARE = 0
    GUARANTEED_BURST_SHARE = 1
    NATIVE_BURST_SHARE = 2

    @property
    def label(self) -> str:
        """The policy's name as people write it: ``fixed-share`` and so on."""
        return self.name.lower().replace("_", "-")


class Enforcer(str, Enum):
    """What meets an allocation over the limit: the best first."""

    NATIVE = "native"
    KILL = "kill"
    OBSERVE = "observe"


def enforcer_in_force(wanted: Optional[Enforcer], native: bool, tracked: bool) -> Enforcer:
    """What really meets an allocation over the limit.

    ``wanted`` None: the best that there is. ``native``: the driver has limits of its own.
    ``tracked``: programs in the kernel count; without them nobody is there to kill.
    """
    if wanted is Enforcer.NATIVE or (wanted is None and native):
        return Enforcer.NATIVE
    return (wanted or Enforcer.KILL) if tracked else Enforcer.OBSERVE


@dataclass(frozen=True)
class Device:
    """One physical card as NVML reports it."""

    index: int
    uuid: str
    name: str
    minor: int
    vmem_total_bytes: int
    vmem_reserved_bytes: int = 0
    pci_bus_id: str = ""
    simulated: bool = False

    @property
    def vmem_usable_bytes(self) -> int:
        """What can be promised to containers: the driver's own part is not."""
        return self.vmem_total_bytes - self.vmem_reserved_bytes


@dataclass(frozen=True)
class Request:
    """What somebody asks for. Totals over ``cards``; ``memory_mib`` is None for whole cards."""

    core: int
    memory_mib: Optional[int] = None
    cards: int = 1
    device_index: Optional[int] = None
    online: bool = True
    enforcer: Optional[Enforcer] = None
    privileged: bool = False
    rdma: bool = False
    containers_in_pod: int = 1


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of a container: its path in each hierarchy that it has one of its own in.

    ``unified`` is relative to the cgroup2 mount, ``devices`` and ``freezer`` to their v1 mounts;
    each begins with ``/``. ``inode`` is that of the unified directory, or of the v1 devices
    directory where there is no unified one: with ``hierarchy`` ("unified" or "devices") it names
    this very cgroup, so that another one made later under the same path is told apart.
    """

    inode: int
    unified: Optional[str] = None
    devices: Optional[str] = None
    freezer: Optional[str] = None

    @property
    def hierarchy(self) -> str:
        return "unified" if self.unified is not None else "devices"

    @property
    def path(self) -> str:
        """The path that people are shown."""
        return (self.unified if self.unified is not None else self.devices) or "/"


@dataclass(frozen=True)
class Instance:
    """A share of one device, held by one container.

    ``share_id`` is unique for the life of the ledger, so that figures in the kernel of a released
    instance never mix with those of the next holder of the same (device, instance_id).
    """

    share_id: int
    device_uuid: str
    device_index: int
    instance_id: int
    compute_weight: int
    vmem_limit_bytes: int
    whole_card: bool = False


@dataclass(frozen=True)
class Container:
    """Who holds instances: at most one per device."""

    container_id: str
    cgroup: Cgroup
    instances: Tuple[Instance, ...]
    online: bool = True
    enforcer: Optional[Enforcer] = None
    pod_uid: str = ""
    name: str = ""
    origin: str = "bind"
    created_at_s: float = 0.0

    @property
    def short_id(self) -> str:
        return self.container_id[:12]


@dataclass(frozen=True)
class PidUse:
    """Device memory of one process in one instance.

    ``tracked_bytes`` is what the tracker counted; ``unseen_bytes`` what the driver reports beyond
    it (context sizes that differ, allocations older than the probes), charged as well.
    """

    pid: int
    tracked_bytes: int
    unseen_bytes: int = 0
    contexts: int = 0

    @property
    def used_bytes(self) -> int:
        return self.tracked_bytes + self.unseen_bytes


@dataclass(frozen=True)
class MemoryUse:
    """Device memory of one instance at one moment."""

    share_id: int
    limit_bytes: int
    used_bytes: int
    denials: int = 0
    kills: int = 0
    pids: Tuple[PidUse, ...] = field(default=())

    @property
    def free_bytes(self) -> int:
        """Never negative: an instance over its (lowered) limit has nothing free."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Kill:
    """One process stopped, or one allocation over the limit observed, by the BPF program."""

    share_id: int
    pid: int
    comm: str
    asked_bytes: int
    held_bytes: int
    used_bytes: int
    limit_bytes: int
    killed: bool
    at_ns: int
