"""Cgroups of this node: which a process is in, making and removing those of runs.

A node mounts the unified hierarchy, the v1 hierarchies, or (hybrid) both. Who uses this package
deals with ``Cgroup`` values and need not know which. The device gate on them is gate.py.
"""

import contextlib
import errno
import re
from pathlib import Path
from typing import Collection, Dict, List, NamedTuple, Optional

from mgpu import bpf
from mgpu.cgroups.tree import Tree
from mgpu.cgroups.v1 import DeviceRules
from mgpu.cgroups.v2 import Unified
from mgpu.errors import BadInput, Conflict, NotCapable, NotFound
from mgpu.model import Cgroup
from mgpu.units import shown

UNIFIED, DEVICES, FREEZER = "unified", "devices", "freezer"
PARENT = "/mgpu"
# bpf/mgpu.h, MGPU_MAX_LEVELS: the programs look no deeper for whose a process is.
MAX_LEVELS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class Mounts(NamedTuple):
    """Where each hierarchy is mounted; None: not at all."""

    unified: Optional[Path] = None
    devices: Optional[Path] = None
    freezer: Optional[Path] = None


def find_mounts(mountinfo: str, sys_root: Path) -> Mounts:
    """From the text of /proc/self/mountinfo: the first of each kind at or below ``sys_root``."""
    found: Dict[str, Path] = {}
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        if not source:
            continue
        where = Path(_unescaped(fields.split(" ")[4]))
        if where != sys_root and sys_root not in where.parents:
            continue
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault(UNIFIED, where)
        elif kind == "cgroup":
            for controller in {DEVICES, FREEZER}.intersection(options.split(",")):
                found.setdefault(controller, where)
    return Mounts(found.get(UNIFIED), found.get(DEVICES), found.get(FREEZER))


def _unescaped(text: str) -> str:
    """Spaces and the like are octal in mountinfo (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def open_cgroups(
    proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys/fs/cgroup")
) -> "Cgroups":
    """The cgroups mounted at or below ``sys_root``. Raises NotCapable when there is nothing."""
    mounts = find_mounts((proc_root / "self/mountinfo").read_text(), sys_root)
    if mounts.unified is None and mounts.devices is None:
        remedy = "mount cgroup2 there, or the v1 devices controller"
        raise NotCapable(f"cgroups at {sys_root}", "no cgroup hierarchy is mounted there", remedy)
    return Cgroups(proc_root, mounts)


class Cgroups:
    """The hierarchies in ``mounts``: ``unified``, ``devices``, ``freezer``, None where absent."""

    def __init__(self, proc_root: Path, mounts: Mounts) -> None:
        self._proc_root = proc_root
        self.unified = None if mounts.unified is None else Unified(mounts.unified)
        self.devices = None if mounts.devices is None else DeviceRules(mounts.devices)
        self.freezer = None if mounts.freezer is None else Tree(mounts.freezer)
        all_trees = {UNIFIED: self.unified, DEVICES: self.devices, FREEZER: self.freezer}
        self._trees: Dict[str, Tree] = {n: t for n, t in all_trees.items() if t is not None}

    # Which cgroup is it

    def paths_of(self, pid: int) -> Dict[str, str]:
        """The path of a process in each hierarchy here. Raises NotFound when it is gone."""
        try:
            text = (self._proc_root / str(pid) / "cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            raise NotFound(f"PID {pid}", "no such process", "give one that runs") from None
        return {name: path for name, path in parse_paths(text).items() if name in self._trees}

    def of_pid(self, pid: int) -> Cgroup:
        """The cgroup of a process. Raises NotFound, or BadInput when it has none of its own."""
        own = own_paths(self.paths_of(pid))
        if UNIFIED not in own and DEVICES not in own:
            remedy = "start it in a container or in a cgroup (systemd-run --scope), or use 'run'"
            raise BadInput(f"PID {pid}", "it is in no cgroup of its own", remedy)
        return self.at(own)

    def of_path(self, path: str) -> Cgroup:
        """The cgroup at ``path``: relative to the hierarchies, or in one by its full path.

        Raises BadInput for what is no such path or names a root, NotFound for what is not there.
        """
        asked = f"cgroup {shown(path)}"
        if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise BadInput(asked, "not an absolute path", "give one as /proc/PID/cgroup shows it")
        relative = self._relative(Path(path))
        if relative == "/":
            remedy = "choose a cgroup below it"
            raise BadInput(asked, "it is the root, where all processes are", remedy)
        there = {n: relative for n, tree in self._trees.items() if tree.inode(relative) is not None}
        if UNIFIED not in there and DEVICES not in there:
            raise NotFound(asked, "no such cgroup", "see /proc/PID/cgroup for its path")
        return self.at(there)

    def at(self, paths: Dict[str, str]) -> Cgroup:
        """The cgroup with these paths, by hierarchy. Raises NotFound, or BadInput: too deep."""
        name = UNIFIED if UNIFIED in paths else DEVICES
        if name == UNIFIED and paths[name].count("/") > MAX_LEVELS:
            raise BadInput(
                f"cgroup {shown(paths[name])}",
                f"it lies more than {MAX_LEVELS} levels below the root",
                "choose one nearer to it",
            )
        inode = self._trees[name].inode(paths[name])
        if inode is None:
            raise NotFound(
                f"cgroup {shown(paths[name])}", "no such cgroup", "it may just have ended"
            )
        return Cgroup(inode, paths.get(UNIFIED), paths.get(DEVICES), paths.get(FREEZER))

    def find(self, hierarchy: str, inode: int) -> Optional[Cgroup]:
        """The cgroup with this inode, by a walk over the whole hierarchy; None: it is gone."""
        tree = self._trees.get(hierarchy)
        if tree is None:
            return None
        for path in tree.walk("/"):
            if tree.inode(path) == inode:
                names = [n for n in self._trees if n != UNIFIED or hierarchy == UNIFIED]
                return self.at({n: path for n in names if self._trees[n].inode(path) is not None})
        return None

    def _relative(self, path: Path) -> str:
        """``path`` without the mount that it may begin with, the longest first."""
        mounts = sorted((t.mount for t in self._trees.values()), key=lambda m: -len(m.parts))
        for mount in mounts:
            if path == mount or mount in path.parents:
                path = Path("/") / path.relative_to(mount)
                break
        return str(Path("/") / str(path).lstrip("/"))

    # What is in it

    def exists(self, cgroup: Cgroup) -> bool:
        """Whether this very cgroup is there: another made under its path later is not it."""
        tree = self._trees.get(cgroup.hierarchy)
        return tree is not None and tree.inode(cgroup.path) == cgroup.inode

    def members(self, cgroup: Cgroup) -> List[int]:
        """PIDs in the cgroup and below it; none when it is gone."""
        return self._trees[cgroup.hierarchy].members(cgroup.path) if self.exists(cgroup) else []

    def inodes_inside(self, cgroup: Cgroup) -> List[int]:
        """Those of the cgroups below it, in the hierarchy that names it."""
        if not self.exists(cgroup):
            return []
        tree = self._trees[cgroup.hierarchy]
        found = [tree.inode(path) for path in tree.walk(cgroup.path) if path != cgroup.path]
        return [inode for inode in found if inode is not None]

    def populated(self, cgroup: Cgroup) -> bool:
        """Whether a process is in it or below it, zombies left out."""
        if self.unified is not None and cgroup.unified is not None:
            return self.exists(cgroup) and self.unified.populated(cgroup.unified)
        return bool(self.members(cgroup))

    def attached(self, cgroup: Cgroup) -> List[bpf.ProgramInfo]:
        """The device programs on this very cgroup, anybody's; none in a v1 hierarchy."""
        if self.unified is None or cgroup.unified is None or not self.exists(cgroup):
            return []
        return self.unified.attached(cgroup.unified)

    # Cgroups of our own

    def create(self, name: str) -> Cgroup:
        """Make /mgpu/``name`` in every hierarchy here. Raises BadInput, Conflict or OSError."""
        if not _NAME.fullmatch(name):
            remedy = "use letters, digits, '-', '_' and '.'"
            raise BadInput(f"cgroup {shown(name)}", "not a name for a cgroup", remedy)
        path = f"{PARENT}/{name}"
        made: List[Tree] = []
        try:
            for tree in self._trees.values():
                if all(tree.mount != other.mount for other in made):
                    tree.make(path)
                    made.append(tree)
            return self.at(dict.fromkeys(self._trees, path))
        except OSError as error:
            for tree in made:
                tree.remove(path)
            if isinstance(error, FileExistsError):
                raise Conflict(f"cgroup {path}", "it is there already", "remove it") from None
            raise

    def add(self, cgroup: Cgroup, pid: int) -> None:
        """Move a process in. Raises NotFound when either is gone, OSError as the kernel does."""
        if not self.exists(cgroup):
            raise NotFound(f"cgroup {cgroup.path}", "it is gone", "make it again")
        try:
            for tree, path in self._places(cgroup):
                tree.add(path, pid)
        except ProcessLookupError:
            raise NotFound(f"PID {pid}", "no such process", "give one that runs") from None

    def remove(self, cgroup: Cgroup) -> None:
        """Remove it and those below it. Raises Conflict while processes are in it."""
        if not self.exists(cgroup):
            return
        # The one that names the cgroup goes last, so that what failed half way can be tried again.
        for tree, path in reversed(self._places(cgroup)):
            try:
                tree.remove(path)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                remedy = "end its processes first"
                raise Conflict(f"cgroup {path}", "processes are in it", remedy) from None
            if path.startswith(f"{PARENT}/"):
                tree.remove_if_empty(PARENT)

    def remove_ours(self, known: Collection[str] = ()) -> List[str]:
        """Remove the cgroups below /mgpu, save ``known``; what is in them goes to the root.

        Returns the paths removed. The parent goes with the last of them.
        """
        removed: List[str] = []
        for tree in self._trees.values():
            for path in reversed(list(tree.walk(PARENT))):
                if any((kept + "/").startswith(path + "/") for kept in known):
                    continue
                if any(path.startswith(kept + "/") for kept in known):
                    continue
                for pid in tree.own_members(path):
                    with contextlib.suppress(OSError):
                        tree.add("/", pid)
                tree.remove_if_empty(path)
                if tree.inode(path) is None and path not in removed and path != PARENT:
                    removed.append(path)
        return removed

    def _places(self, cgroup: Cgroup) -> "List[Place]":
        """Where it is, the hierarchy that names it first."""
        paths = {UNIFIED: cgroup.unified, DEVICES: cgroup.devices, FREEZER: cgroup.freezer}
        places = []
        for name, path in paths.items():
            if path is not None and name in self._trees:
                places.append(Place(self._trees[name], path))
        return places


class Place(NamedTuple):
    """A cgroup's directory: its hierarchy and its path there."""

    tree: Tree
    path: str


def parse_paths(text: str) -> Dict[str, str]:
    """The paths in the text of /proc/PID/cgroup, by hierarchy (cgroups(7))."""
    paths: Dict[str, str] = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[UNIFIED] = path
        for name in {DEVICES, FREEZER}.intersection(controllers.split(",")):
            paths[name] = path
    return paths


def own_paths(paths: Dict[str, str]) -> Dict[str, str]:
    """Those of a process's paths that name a cgroup of its own, not one shared with others.

    Roots and slices are shared. Where the unified and the devices path differ, the one above the
    other is shared too; where neither is above, a manager made the devices one for the container
    and left all of its containers in its own unified cgroup, as Docker does on hybrid hosts.
    """
    own = {name: path for name, path in paths.items() if not _shared(path)}
    unified, devices = own.get(UNIFIED), own.get(DEVICES)
    if unified is not None and devices is not None and unified != devices:
        del own[DEVICES if unified.startswith(f"{devices}/") else UNIFIED]
    key = own.get(UNIFIED, own.get(DEVICES))
    if FREEZER in own and own[FREEZER] != key:
        del own[FREEZER]
    return own


def _shared(path: str) -> bool:
    return path == "/" or path.endswith((".slice", "/init.scope", " (deleted)"))
