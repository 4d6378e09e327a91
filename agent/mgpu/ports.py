"""What the front (figures, changes, service, metrics) needs of the rest of the agent."""

from dataclasses import dataclass
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Protocol, Tuple

from mgpu.model import Cgroup, Container, Enforcer, MemoryUse, enforcer_in_force


@dataclass(frozen=True)
class NodeFacts:
    """What this agent is and does on this node.

    ``compute_scheduled`` says whether shares of device time are enforced here; ``card_major`` is
    the major number of the device nodes, None before any was made; ``enforce`` what agent.conf
    wants, None: the best; ``native`` whether the driver has limits of its own.
    """

    version: str
    tracker: str
    enforce: Optional[Enforcer]
    simulated: bool = False
    compute_scheduled: bool = False
    card_major: Optional[int] = None
    started_at_s: float = 0.0
    native: bool = False

    @property
    def enforcer(self) -> Enforcer:
        """What is in force for containers that have not chosen for themselves."""
        return enforcer_in_force(self.enforce, self.native, self.tracker != "nvml")

    def enforcer_of(self, container: Container) -> Enforcer:
        """What is in force for a container."""
        native = self.native and container.cgroup.unified is not None
        wanted = container.enforcer or self.enforce
        return enforcer_in_force(wanted, native, self.tracker != "nvml")


# share_id -> figures of the tracker; an instance without an entry has no figures now.
Usage = Callable[[], Mapping[int, MemoryUse]]


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a unix socket, as the kernel says (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"pid={self.pid} uid={self.uid} gid={self.gid}"


class Resolver(Protocol):
    """containers.py: who is meant by a container id, a PID or a cgroup path."""

    def resolve(self, target: str) -> Tuple[str, Cgroup, str, str]:
        """(container_id, cgroup, pod_uid, name). Raises NotFound or BadInput."""


class Groups(Protocol):
    """cgroups/: the cgroups of runs, and whether those of containers are still there."""

    def create(self, name: str) -> Cgroup: ...
    def add(self, cgroup: Cgroup, pid: int) -> None: ...
    def remove(self, cgroup: Cgroup) -> None: ...
    def exists(self, cgroup: Cgroup) -> bool: ...
    def members(self, cgroup: Cgroup) -> List[int]: ...


class Processes(Protocol):
    """processes.py: whose child a process is."""

    def child_of(self, peer: Peer, pid: int) -> int:
        """The child of ``peer`` that calls itself ``pid``. Raises NotFound or NotPermitted."""

    def kill(self, pids: Iterable[int]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The collaborators that touch the kernel.

    ``apply`` makes the kernel agree with the ledger about one container (none: about what concerns
    all) and raises where that cannot be done. ``check`` says what this node can do.
    """

    resolver: Resolver
    groups: Groups
    processes: Processes
    apply: Callable[[Optional[str]], None]
    check: Callable[[], List[Dict[str, object]]]
