"""What the agent has in the kernel, as one: nodes, gate, maps and probes, in the right order.

The order is what counts here: limits and counters come before the gate opens a card, and go after
what the gate gave is taken back. The entry in the map `bound` is the last to go: by it the next run
finds what a crash left.
"""

import contextlib
import os
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set

from mgpu import log
from mgpu.cgroups import DEVICES, UNIFIED, Cgroups
from mgpu.cgroups.gate import Gate
from mgpu.config import Config
from mgpu.errors import Conflict, MgpuError, NotCapable, NotFound
from mgpu.ledger import Ledger
from mgpu.model import (
    MIB,
    Cgroup,
    Container,
    Device,
    Enforcer,
    MemoryUse,
    enforcer_in_force,
)
from mgpu.native import NativeLimits
from mgpu.nodes import Nodes, Numbers, nodes_of
from mgpu.probes import helpers
from mgpu.probes.layout import ROOT_SHIFT
from mgpu.probes.tracking import Tracking
from mgpu.unseen import ProcessShare

MAJOR_FACT = "simulated-major"
HOLDERS_REMEMBERED = 8192


class Holder(NamedTuple):
    """The container of an instance, and its device's index."""

    container: str
    device_index: int


class Kernel:
    """Over parts that each own one thing; ``tracking`` has no tables where eBPF cannot be had."""

    def __init__(
        self,
        ledger: Ledger,
        nodes: Nodes,
        cgroups: Cgroups,
        gate: Gate,
        tracking: Tracking,
        native: NativeLimits,
        proc_root: Path,
    ) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._cgroups = cgroups
        self._gate = gate
        self._tracking = tracking
        self._native = native
        self._proc_root = proc_root
        self._minor_of: Dict[str, int] = {}
        self._bound: Dict[int, Cgroup] = {}
        self._inside: Dict[int, Set[int]] = {}
        self._cards: Sequence[Device] = ()
        self._foreign: Set[str] = set()
        self._followed: Set[int] = set()
        self._looked_at: Set[int] = set()
        self._holders: OrderedDict[int, Holder] = OrderedDict()
        self.numbers: Optional[Numbers] = None

    # Making it so

    def prepare(
        self, cards: Sequence[Device], containers: Sequence[Container], config: Config
    ) -> None:
        """What concerns all containers: the numbers in the maps, and the nodes.

        Without any card (NVML has never answered) the nodes that are there stay.
        """
        self.numbers = self._read_numbers()
        self._minor_of = {card.uuid: card.minor for card in cards}
        if self._tracking.tables is not None:
            self._tracking.tables.set_settings(self.numbers, config.context_mib * MIB)
            self._tracking.tables.set_uuids({_uuid_bytes(card.uuid): card.minor for card in cards})
        if cards:
            self._cards = cards
            foreign = set(self._nodes.ensure(self.numbers, cards, containers))
            for name in sorted(foreign - self._foreign):
                log.warning("node-lacks", node=name, why="something else has the name")
            self._foreign = foreign

    def bind(self, container: Container, config: Config) -> None:
        """The gate, then limits and the container's entry. Raises MgpuError or OSError."""
        self._remember(container)
        if not self._cgroups.exists(container.cgroup):
            raise NotFound(f"cgroup {container.cgroup.path}", "it is gone", "start it again")
        minors = self._minors(container)
        assert self.numbers is not None
        self._gate.close(container.cgroup, self.numbers, minors)
        self.limit(container, config)
        self._bound[self._key(container.cgroup)] = container.cgroup
        self._check_nodes(container)

    def limit(self, container: Container, config: Config) -> None:
        """Limits and the container's entry in the maps alone. Raises MgpuError or OSError."""
        self._minors(container)
        enforcer = self._enforcer(container, config)
        self._native.keep(container, enforcer is Enforcer.NATIVE)
        if self._tracking.tables is not None:
            key = self._key(container.cgroup)
            self._inside[key] = self._keys_inside(container.cgroup)
            for each in (key, *self._inside[key]):
                self._tracking.tables.bind(each, container, self._minor_of, enforcer)

    def drop_strangers(self, containers: Sequence[Container]) -> None:
        """Take away what belongs to no container of the ledger."""
        own = {self._key(container.cgroup) for container in containers}
        self._inside = {key: inside for key, inside in self._inside.items() if key in own}
        keys = own.union(*self._inside.values())
        shares = {i.share_id for container in containers for i in container.instances}
        there = set(self._bound)
        if self._tracking.tables is not None:
            there |= set(self._tracking.tables.bound())
        for key in there - keys:
            cgroup = self._bound.pop(key, None) or self._find(key)
            if cgroup is not None:
                self._gate.open(cgroup, self.numbers)
                self._native.clear(cgroup)
            if self._tracking.tables is not None:
                self._tracking.tables.unbind(key)
        if self._tracking.tables is not None:
            for share_id in set(self._tracking.tables.share_ids()) - shares:
                self._tracking.tables.remove_share(share_id)

    def guard(self, globs: Sequence[str]) -> None:
        """Close the guarded subtrees to whoever has no instance."""
        if self._tracking.tables is not None:
            self._gate.guard(globs)

    def open_strange_gates(self, containers: Sequence[Container]) -> None:
        """Gates that a former run of the agent left on cgroups that no container has any more.

        It walks the whole tree: once, when the agent starts.
        """
        known = {c.cgroup.unified for c in containers}
        guarded = set(self._gate.guarded())
        if self._tracking.tables is None:
            return
        for path in self._gate.everywhere():
            if path not in known and path not in guarded:
                self._gate.detach(path)

    def follow(self, containers: Sequence[Container]) -> None:
        """Probe the libraries of the containers' processes that were not looked at yet."""
        if self._tracking.tables is None:
            return
        if self._tracking.mend():
            self.look_again()
        members: Set[int] = set()
        for container in containers:
            pids = self._cgroups.members(container.cgroup)
            members.update(pids)
            if not (self._by_cgroup_id(container.cgroup) and helpers.see_ancestors()):
                self._tracking.tables.follow(self._threads(pids), self._key(container.cgroup))
        if self._tracking.tracker is not None:
            self._tracking.tracker.sync(members - self._looked_at)
        self._looked_at |= members
        self._followed |= members

    def look_again(self) -> None:
        """The next ``follow`` looks at every process, as if it had seen none."""
        self._looked_at.clear()

    def mapped(self, pid: int, containers: Sequence[Container]) -> bool:
        """A process has mapped a libcuda: probe it if it is a container's."""
        if self._tracking.tracker is None or self.container_of(pid, containers) is None:
            return False
        self._tracking.tracker.sync([pid])
        self._looked_at.add(pid)
        self._followed.add(pid)
        return True

    def ended(self, pids: Iterable[int]) -> None:
        """These processes have ended: what they held goes, and their libraries' probes."""
        gone = [pid for pid in pids if not self._alive(pid)]
        for pid in gone:
            if self._tracking.tables is not None and self._tracking.tables.born_ns(pid):
                self._tracking.tables.drop_process(pid)
        self._followed.difference_update(gone)
        self._looked_at.difference_update(gone)
        if self._tracking.tracker is not None:
            self._tracking.tracker.forget(gone)

    def is_watched(self, pid: int) -> bool:
        """Whether the end of this process matters; asked for every exit of the host."""
        return pid in self._followed

    def watched(self) -> Set[int]:
        """The processes whose end matters."""
        return set(self._followed)

    def sweep(self) -> None:
        """Second line behind the exit events: whatever has died unseen."""
        if self._tracking.tables is None:
            return
        known = set(self._tracking.tables.pids()) | self._followed
        if self._tracking.tracker is not None:
            known |= self._tracking.tracker.users()
        self.ended(known)
        self._tracking.tables.sweep_objects()

    # Reading

    def tracked(self) -> Dict[ProcessShare, int]:
        return self._tracking.tables.tracked() if self._tracking.tables is not None else {}

    def unseen(self) -> Dict[ProcessShare, int]:
        return self._tracking.tables.unseen() if self._tracking.tables is not None else {}

    def set_unseen(self, unseen: Mapping[ProcessShare, int]) -> None:
        if self._tracking.tables is not None:
            self._tracking.tables.set_unseen(unseen)

    def usage(self) -> Dict[int, MemoryUse]:
        return self._tracking.tables.usage() if self._tracking.tables is not None else {}

    def container_of(self, pid: int, containers: Sequence[Container]) -> Optional[str]:
        """The id of the container that a process is in; None: in none of these, or gone."""
        try:
            paths = self._cgroups.paths_of(pid)
        except MgpuError:
            return None
        for container in containers:
            cgroup = container.cgroup
            path = paths.get(cgroup.hierarchy, "/")
            if path == cgroup.path or path.startswith(cgroup.path + "/"):
                return container.container_id
        return None

    def holder(self, share_id: int) -> Holder:
        """Who has or had an instance: what the kernel tells may come after its release."""
        return self._holders.get(share_id, Holder("unknown", -1))

    # Taking it all away

    def teardown(self, containers: Sequence[Container]) -> List[str]:
        """Take nodes and gates away; what was found. Maps and probes are ``tracking``'s."""
        found = [f"gate on cgroup {path}" for path in self._gate.everywhere()]
        numbers = self._read_numbers()
        for container in containers:
            self._gate.open(container.cgroup, numbers)
            with contextlib.suppress(MgpuError):  # a driver that is gone has no limits either
                self._native.clear(container.cgroup)
        for path in self._gate.everywhere():
            self._gate.detach(path)
        found += [f"node {path}" for path in self._nodes.all()]
        self._nodes.remove_all()
        return found

    # Steps

    def _remember(self, container: Container) -> None:
        for instance in container.instances:
            self._holders[instance.share_id] = Holder(container.short_id, instance.device_index)
        while len(self._holders) > HOLDERS_REMEMBERED:
            self._holders.popitem(last=False)

    def _enforcer(self, container: Container, config: Config) -> Enforcer:
        wanted = container.enforcer or config.enforce
        native = self._native.holds(container.cgroup)
        return enforcer_in_force(wanted, native, self._tracking.tracker is not None)

    def _check_nodes(self, container: Container) -> None:
        """Raises Conflict when something that is no node of ours has the name of one of its."""
        assert self.numbers is not None
        names = [node.name for node in nodes_of(self.numbers, self._cards, container)]
        taken = self._foreign.intersection(names)
        if taken:
            asked = f"device node {', '.join(sorted(taken))}"
            raise Conflict(asked, "something else has the name", "move it away")

    def _read_numbers(self) -> Numbers:
        """The node's numbers; a simulation keeps its major over restarts."""
        remembered = self._ledger.facts().get(MAJOR_FACT)
        numbers = self._nodes.numbers(int(remembered) if remembered else None)
        if numbers.simulated and str(numbers.card_major) != remembered:
            self._ledger.set_fact(MAJOR_FACT, str(numbers.card_major))
        return numbers

    def _minors(self, container: Container) -> List[int]:
        missing = [i for i in container.instances if i.device_uuid not in self._minor_of]
        if missing:
            raise NotCapable(
                f"device {missing[0].device_uuid}",
                "the driver does not list this card now",
                "it is bound again when the card is back",
            )
        return [self._minor_of[i.device_uuid] for i in container.instances]

    def _by_cgroup_id(self, cgroup: Cgroup) -> bool:
        return cgroup.unified is not None

    def _key(self, cgroup: Cgroup) -> int:
        """The cgroup's key in the map `bound` (bpf/mgpu.h)."""
        if self._by_cgroup_id(cgroup):
            return cgroup.inode
        return cgroup.inode | self._devices_hierarchy() << ROOT_SHIFT

    def _keys_inside(self, cgroup: Cgroup) -> Set[int]:
        """The keys of the cgroups inside, where the programs do not find out by themselves.

        One made since the last run opens no card until the next; its processes are followed.
        """
        if not self._by_cgroup_id(cgroup) or helpers.see_ancestors():
            return set()
        return set(self._cgroups.inodes_inside(cgroup))

    def _find(self, key: int) -> Optional[Cgroup]:
        """The cgroup with this key in the map `bound`, which a former run put there."""
        inode, hierarchy = key & ((1 << ROOT_SHIFT) - 1), DEVICES if key >> ROOT_SHIFT else UNIFIED
        return self._cgroups.find(hierarchy, inode)

    def _devices_hierarchy(self) -> int:
        for line in (self._proc_root / "cgroups").read_text().splitlines():
            words = line.split()
            if words[0] == "devices":
                return int(words[1])
        return 0

    def _threads(self, pids: Iterable[int]) -> List[int]:
        found: List[int] = []
        for pid in pids:
            try:
                found += [int(tid) for tid in os.listdir(self._proc_root / str(pid) / "task")]
            except OSError:
                continue
        return found

    def _alive(self, pid: int) -> bool:
        """Whether any thread of the process still runs: a zombie has closed its files."""
        folder = self._proc_root / str(pid)
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            return state not in "ZX" or len(os.listdir(folder / "task")) > 1
        except (OSError, IndexError):
            return False


def _uuid_bytes(text: str) -> bytes:
    """The 16 bytes of an NVML UUID (GPU-xxxxxxxx-...), as cuDeviceGetUuid returns them."""
    try:
        return uuid.UUID(text.partition("-")[2]).bytes
    except ValueError:
        return bytes(16)
