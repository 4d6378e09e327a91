"""A node without hardware for the tests of the front: real ledger, rules and placement; the parts
that are kernel or driver are kept in memory."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Dict, List, Optional, Tuple

from mgpu.config import Config
from mgpu.devices import Card
from mgpu.devices import Figures as CardFigures
from mgpu.errors import NotCapable, NotFound
from mgpu.figures import Figures
from mgpu.ledger import Ledger
from mgpu.model import MIB, Cgroup, Device, Enforcer, MemoryUse, PidUse
from mgpu.ports import NodeFacts, Parts, Peer
from mgpu.processes import Processes
from mgpu.service import Service

H200 = Device(0, "GPU-00000000-h200", "NVIDIA H200 (simulated)", 0, 143771 * MIB, simulated=True)
A10 = Device(1, "GPU-11111111-a10", "NVIDIA A10 (simulated)", 1, 23028 * MIB, simulated=True)
PEER = Peer(pid=100, uid=1000, gid=1000)


class Cards:
    """The cards; ``lost`` maps UUIDs to reasons, ``processes`` to the driver's figures."""

    def __init__(self, devices: Tuple[Device, ...]) -> None:
        self.devices = devices
        self.lost: Dict[str, str] = {}
        self.processes: Dict[str, Dict[int, int]] = {}
        self.missing = False

    def cards(self) -> Tuple[Card, ...]:
        if self.missing:
            raise NotCapable("the cards of this node", "NVML cannot be used", "install it")
        return tuple(self._card(device) for device in self.devices)

    def inventory(self) -> Tuple[Device, ...]:
        return tuple(card.device for card in self.cards())

    def _card(self, device: Device) -> Card:
        if device.uuid in self.lost:
            return Card(device, lost=self.lost[device.uuid])
        processes = self.processes.get(device.uuid, {})
        used = sum(processes.values())
        total = device.vmem_total_bytes
        return Card(device, "", CardFigures(total, 0, used, total - used, 0.25), processes)


class Groups:
    """Cgroups by path; a new one under an old path has another inode."""

    def __init__(self) -> None:
        self.alive: Dict[str, Cgroup] = {}
        self.inside: Dict[int, List[int]] = {}
        self.refuse_add: Optional[Exception] = None
        self.still_there: Callable[[int], bool] = lambda pid: True
        self._inode = 1000

    def make(self, path: str) -> Cgroup:
        self._inode += 1
        self.alive[path] = Cgroup(self._inode, unified=path)
        self.inside[self._inode] = []
        return self.alive[path]

    def create(self, name: str) -> Cgroup:
        return self.make(f"/mgpu/{name}")

    def add(self, cgroup: Cgroup, pid: int) -> None:
        if self.refuse_add is not None:
            raise self.refuse_add
        self.inside[cgroup.inode].append(pid)

    def remove(self, cgroup: Cgroup) -> None:
        if self.members(cgroup):
            raise OSError(16, "Device or resource busy")
        del self.alive[cgroup.path]

    def exists(self, cgroup: Cgroup) -> bool:
        return self.alive.get(cgroup.path) == cgroup

    def members(self, cgroup: Cgroup) -> List[int]:
        return [pid for pid in self.inside[cgroup.inode] if self.still_there(pid)]


class Node:
    """Everything wired together, as the daemon does it."""

    def __init__(
        self,
        folder: Path,
        devices: Tuple[Device, ...] = (H200, A10),
        processes: Optional[Processes] = None,
    ) -> None:
        self.ledger = Ledger(folder / "state.db", "boot")
        self.cards = Cards(devices)
        self.groups = Groups()
        self.uses: Dict[int, MemoryUse] = {}
        self.config = Config()
        self.facts = NodeFacts("0.1.0", "cuda", Enforcer.KILL, True, card_major=240, started_at_s=1)
        self.applied: List[str] = []
        self.refuse_apply: Optional[Exception] = None
        self.during_apply: Callable[[str], None] = lambda container_id: None
        self.figures = Figures(
            self.ledger,
            self.cards,  # type: ignore[arg-type]
            lambda: self.uses,
            lambda: self.facts,
            lambda: self.config,
        )
        if processes is None:
            processes = SimpleNamespace(child_of=self._child_of, kill=self._kill)
        else:
            self.groups.still_there = lambda pid: os.path.exists(f"/proc/{pid}")
        self.service = Service(
            self.figures,
            Parts(
                resolver=SimpleNamespace(resolve=self._resolve),
                groups=self.groups,
                processes=processes,
                apply=self._apply,
                check=lambda: [dict(CHECK)],
            ),
        )

    def bind(self, target: str, core: int = 30, memory_mib: int = 4096, **more: object) -> str:
        """A container at /containers/<target>; returns its id."""
        if f"/containers/{target}" not in self.groups.alive:
            self.groups.make(f"/containers/{target}")
        values = {"target": target, "core": core, "memory_mib": memory_mib, **more}
        return str(self.service.bind(values)["id"])

    def use(self, container: str, *pids: PidUse, **more: int) -> None:
        """The tracker's figures of a container's first instance."""
        instance = self.ledger.find(container).instances[0]
        used = sum(pid.used_bytes for pid in pids)
        self.uses[instance.share_id] = MemoryUse(
            instance.share_id, instance.vmem_limit_bytes, used, pids=pids, **more
        )

    def _resolve(self, target: str) -> Tuple[str, Cgroup, str, str]:
        cgroup = self.groups.alive.get(f"/containers/{target}")
        if cgroup is None:
            raise NotFound(f"target {target}", "no such container, PID or cgroup", "look again")
        return target.ljust(64, "0"), cgroup, "", ""

    def _child_of(self, peer: Peer, pid: int) -> int:
        if pid != 4711:
            raise NotFound(f"PID {pid}", "not a child of the asking process", "fork it first")
        return pid

    def _kill(self, pids: List[int]) -> None:
        for inside in self.groups.inside.values():
            inside[:] = [pid for pid in inside if pid not in pids]

    def _apply(self, container_id: Optional[str]) -> None:
        self.applied.append(container_id or "")
        self.during_apply(container_id or "")
        if self.refuse_apply is not None:
            raise self.refuse_apply


CHECK = {
    "kind": "tracker",
    "name": "rm",
    "available": False,
    "in_use": False,
    "reason": "no kprobes",
    "remedy": "boot a kernel with CONFIG_KPROBES",
}


def fill(node: Node, containers: int, pids: int) -> None:
    """So many containers of one instance each with so many processes of 1 MiB each."""
    per_card = 16
    count = -(-containers // per_card)
    node.cards.devices = tuple(
        replace(H200, index=i, minor=i, uuid=f"GPU-{i:08}") for i in range(count)
    )
    for number in range(containers):
        node.bind(f"{number:012x}", core=5, memory_mib=1024)
        first = 10_000 + number * pids
        node.use(
            f"{number:012x}",
            *(PidUse(first + n, MIB, contexts=1) for n in range(pids)),
        )
        share = node.ledger.find(f"{number:012x}").instances[0]
        known = node.cards.processes.setdefault(share.device_uuid, {})
        known.update({first + n: MIB for n in range(pids)})


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until ``condition`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)
