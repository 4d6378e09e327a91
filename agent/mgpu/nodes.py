"""The character nodes /dev/mgpu*, and the numbers of NVIDIA's devices that they carry.

``/dev/mgpuX`` and ``/dev/mgpuXinstY`` have the number of the card's own node, and
``/dev/mgpuXctl-CONTAINER`` has nvidiactl's. Owns these names and its links in /dev/char; touches
nothing else there. Making nodes needs CAP_MKNOD.
"""

import errno
import grp
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from mgpu.errors import ConfigInvalid, NotCapable
from mgpu.model import Container, Device

# nv-linux.h: NV_CONTROL_DEVICE_MINOR is 255 of the cards' major, modeset's is 254; nvidia-uvm is
# minor 0 of a major of its own, nvidia-uvm-tools minor 1.
CTL_MINOR = 255
UVM_MINOR = 0
# Without a driver there is one major for all: the simulated uvm takes a minor that no card has.
SIMULATED_UVM_MINOR = 254
# Documentation/admin-guide/devices.txt of the kernel: LOCAL/EXPERIMENTAL USE.
LOCAL_MAJORS = (*range(60, 64), *range(120, 128), *range(240, 255))

_OURS = re.compile(r"mgpu[0-9]+(inst[0-9]+|ctl-[0-9a-zA-Z_.-]+)?\Z")
_TEMPORARY = ".mgpu-new-"


@dataclass(frozen=True)
class Numbers:
    """Device numbers of this node. ``others`` are further majors of NVIDIA's (caps, nvswitch)."""

    card_major: int
    ctl_minor: int
    uvm_major: int
    uvm_minor: int
    simulated: bool
    others: Tuple[int, ...] = ()


def read_majors(text: str) -> Dict[str, int]:
    """Majors of character devices by name, of the text of /proc/devices."""
    majors: Dict[str, int] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            majors.setdefault(name.strip(), int(number))
    return majors


def choose_numbers(majors: Dict[str, int], remembered: Optional[int]) -> Numbers:
    """The driver's numbers where it is loaded, else a free major: ``remembered`` if still free.

    Raises NotCapable when no local major is free.
    """
    card = majors.get("nvidia-frontend", majors.get("nvidia"))
    uvm = majors.get("nvidia-uvm")
    if card is not None:
        others = {n for name, n in majors.items() if name.startswith("nvidia")} - {card, uvm}
        # Without nvidia-uvm loaded nothing has its number: there is nothing to open or close.
        return Numbers(
            card, CTL_MINOR, -1 if uvm is None else uvm, UVM_MINOR, False, tuple(sorted(others))
        )
    free = [major for major in LOCAL_MAJORS if major not in majors.values()]
    if not free:
        remedy = "free one of the majors 60-63, 120-127 or 240-254"
        raise NotCapable("device nodes", "no local device major is free", remedy)
    major = remembered if remembered in free and remembered is not None else free[0]
    return Numbers(major, CTL_MINOR, major, SIMULATED_UVM_MINOR, True)


class _Node(NamedTuple):
    name: str
    major: int
    minor: int


def wanted_nodes(
    numbers: Numbers, devices: Sequence[Device], containers: Sequence[Container]
) -> List[_Node]:
    """The nodes that must exist, cards first."""
    nodes = [_Node(f"mgpu{d.index}", numbers.card_major, d.minor) for d in devices]
    for container in containers:
        nodes += nodes_of(numbers, devices, container)
    return nodes


def nodes_of(numbers: Numbers, devices: Sequence[Device], container: Container) -> List[_Node]:
    """A container's own nodes. Instances of an unknown card have none."""
    by_uuid = {device.uuid: device for device in devices}
    nodes = []
    for instance in container.instances:
        device = by_uuid.get(instance.device_uuid)
        if device is None:
            continue
        name = f"mgpu{device.index}inst{instance.instance_id}"
        nodes.append(_Node(name, numbers.card_major, device.minor))
        name = f"mgpu{device.index}ctl-{container.short_id}"
        nodes.append(_Node(name, numbers.card_major, numbers.ctl_minor))
    return nodes


class Nodes:
    """The nodes below ``dev_root``. ``owner`` and ``group`` are names or numbers.

    Raises ConfigInvalid when there is no such user or group.
    """

    def __init__(
        self,
        dev_root: Path = Path("/dev"),
        proc_root: Path = Path("/proc"),
        owner: str = "root",
        group: str = "root",
        mode: int = 0o666,
    ) -> None:
        self._dev = dev_root
        self._proc_root = proc_root
        self._uid, self._gid = _uid(owner), _gid(group)
        self._mode = mode

    def numbers(self, remembered: Optional[int] = None) -> Numbers:
        """This node's numbers; ``remembered`` is the major of an earlier simulation here."""
        return choose_numbers(read_majors((self._proc_root / "devices").read_text()), remembered)

    def ensure(
        self, numbers: Numbers, devices: Sequence[Device], containers: Sequence[Container]
    ) -> List[str]:
        """Make exactly the nodes that must be, and their links; take our others away.

        What is there and right stays untouched. Returns the names that something else has, which
        is no device: it stays, and there is no such node. Raises NotCapable without CAP_MKNOD.
        """
        wanted = wanted_nodes(numbers, devices, containers)
        foreign = [node.name for node in wanted if not self._make(node)]
        self._remove_others({node.name for node in wanted})
        made = [node for node in wanted if node.name not in foreign]
        self._link({(node.major, node.minor): node.name for node in reversed(made)})
        return foreign

    def remove_all(self) -> None:
        """Take away every node and link of ours."""
        self._remove_others(set())
        self._link({})

    def all(self) -> List[Path]:
        """Our nodes that are there, and our links."""
        links = [self._dev / "char" / name for name in self._links()]
        return [self._dev / name for name in self._nodes()] + links

    def _make(self, node: _Node) -> bool:
        """False when something foreign is there."""
        path = self._dev / node.name
        number = os.makedev(node.major, node.minor)
        try:
            there = os.lstat(str(path))
        except FileNotFoundError:
            there = None
        if there is not None:
            if not stat.S_ISCHR(there.st_mode):
                return False
            if there.st_rdev == number:
                self._settle(path, there)
                return True
        temporary = self._dev / f"{_TEMPORARY}{node.name}"
        try:
            _unlink(temporary)
            os.mknod(str(temporary), stat.S_IFCHR | 0o600, number)
        except PermissionError:
            remedy = "run as root with CAP_MKNOD, where device nodes may be made"
            raise NotCapable(str(path), "the node cannot be made", remedy) from None
        self._settle(temporary, os.lstat(str(temporary)))
        os.rename(str(temporary), str(path))
        return True

    def _settle(self, path: Path, there: os.stat_result) -> None:
        """Owner first: a change of owner must not meet a mode meant for another."""
        if (there.st_uid, there.st_gid) != (self._uid, self._gid):
            os.chown(str(path), self._uid, self._gid, follow_symlinks=False)
        if stat.S_IMODE(there.st_mode) != self._mode:
            os.chmod(str(path), self._mode)

    def _nodes(self) -> List[str]:
        found = []
        for name in sorted(os.listdir(str(self._dev))):
            bare = name[len(_TEMPORARY) :] if name.startswith(_TEMPORARY) else name
            if _OURS.match(bare) and stat.S_ISCHR(self._kind(self._dev / name)):
                found.append(name)
        return found

    def _remove_others(self, wanted: Set[str]) -> None:
        for name in self._nodes():
            if name not in wanted:
                _unlink(self._dev / name)

    def _links(self) -> Dict[str, str]:
        """Our links in /dev/char, by name: those that point at a name of ours."""
        folder = self._dev / "char"
        found: Dict[str, str] = {}
        try:
            names = sorted(os.listdir(str(folder)))
        except FileNotFoundError:
            return found
        for name in names:
            try:
                target = os.readlink(str(folder / name))
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):
                    continue
                raise
            if target.startswith("../") and _OURS.match(target[3:]):
                found[name] = target[3:]
        return found

    def _link(self, wanted: Dict[Tuple[int, int], str]) -> None:
        """runc and systemd look a device's node up as /dev/char/MAJOR:MINOR."""
        folder = self._dev / "char"
        names = {f"{major}:{minor}": name for (major, minor), name in wanted.items()}
        links = self._links()
        for link in links:
            if link not in names:
                _unlink(folder / link)
        for link, name in names.items():
            path = folder / link
            if links.get(link) == name or (link not in links and os.path.lexists(str(path))):
                continue
            folder.mkdir(exist_ok=True)
            temporary = folder / f"{_TEMPORARY}{link}"
            _unlink(temporary)
            os.symlink(f"../{name}", str(temporary))
            os.rename(str(temporary), str(path))

    def _kind(self, path: Path) -> int:
        try:
            return os.lstat(str(path)).st_mode
        except FileNotFoundError:
            return 0


def _unlink(path: Path) -> None:
    try:
        os.unlink(str(path))
    except FileNotFoundError:
        return


def _uid(name: str) -> int:
    try:
        return int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigInvalid(
            f"node_owner {name}", "no such user", "make it, or choose another"
        ) from None


def _gid(name: str) -> int:
    try:
        return int(name) if name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigInvalid(
            f"node_group {name}", "no such group", "make it, or choose another"
        ) from None
