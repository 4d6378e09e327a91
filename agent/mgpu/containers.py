"""Which container is meant: by its id, by a PID in it, or by its cgroup's path.

Knows how Docker, Podman, containerd, CRI-O and the kubelet name cgroups, with the systemd and the
cgroupfs driver. Reads cgroups; asks no runtime.
"""

import hashlib
import re
from typing import Dict, List, NamedTuple, Optional, Tuple

from mgpu.cgroups import DEVICES, FREEZER, UNIFIED, Cgroups
from mgpu.cgroups.tree import Tree
from mgpu.errors import BadInput, NotFound
from mgpu.model import Cgroup
from mgpu.units import shown

Resolved = Tuple[str, Cgroup, str, str]

# docker-ID.scope, libpod-ID.scope, cri-containerd-ID.scope, crio-ID.scope, nerdctl-ID.scope,
# SLICE:cri-containerd:ID, libpod-ID, ID. The monitors beside a container have "conmon" before ID.
_CONTAINER = re.compile(r"(?:(?P<manager>[a-z0-9._-]*)[-:])?(?P<id>[0-9a-f]{64})(?:\.scope)?\Z")
_QUALIFIED = re.compile(r".*:(?P<manager>[a-z0-9._-]+):(?P<id>[0-9a-f]{64})\Z")
# kubepods[-burstable|-besteffort]-podUID.slice with "_" for "-", or .../podUID.
_POD = re.compile(
    r"(?:kubepods-(?:burstable-|besteffort-)?)?pod"
    r"(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?\Z"
)
# What runtimes and the kubelet put their containers into, and the services that they are. On hybrid
# hosts a runtime's own cgroup holds the processes of its containers too.
_MANAGER = re.compile(
    r"(?:kubepods(?:-burstable|-besteffort)?(?:\.slice)?|kubelet(?:\.slice)?|burstable|besteffort|"
    r"docker|libpod_parent|machine\.slice|mgpu|"
    r"(?:docker|containerd|crio|cri-o|podman|kubelet|k3s|rke2-server|rke2-agent)\.service)\Z"
)
# kernel.pid_max is at most 2^22; a container id has 12 digits at least.
_PID = re.compile(r"[0-9]{1,10}\Z")
_ID = re.compile(r"[0-9a-f]{12,64}\Z")


class Named(NamedTuple):
    """What a cgroup's path says: the container's id, its pod's uid and its own path."""

    container_id: str
    pod_uid: str
    path: str


def read_path(path: str) -> Optional[Named]:
    """The innermost container that ``path`` lies in; None when it names none."""
    parts = path.split("/")
    for last in range(len(parts) - 1, -1, -1):
        container_id = _container_id(parts[last])
        if container_id:
            return Named(container_id, _pod_uid(parts[: last + 1]), "/".join(parts[: last + 1]))
    return None


def _container_id(part: str) -> str:
    match = _CONTAINER.match(part) or _QUALIFIED.match(part)
    if match is None or "conmon" in (match.group("manager") or ""):
        return ""
    return match.group("id")


def _pod_uid(parts: List[str]) -> str:
    for part in reversed(parts):
        match = _POD.match(part.split(":")[0])
        if match:
            return match.group("uid").replace("_", "-")
    return ""


class Containers:
    """Finds containers in the cgroups of this node."""

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups

    def resolve(self, target: str) -> Resolved:
        """(container id, cgroup, pod uid, name) of a container id, a PID or a cgroup path.

        The name is empty for a container: only its runtime knows it. A cgroup that no runtime made
        gets an id made of its path and inode, and its last part as the name. Raises BadInput or
        NotFound.
        """
        if target.startswith("/"):
            return self._of_cgroup(self._cgroups.of_path(target))
        if _PID.match(target):
            return self._of_pid(int(target))
        if _ID.match(target):
            return self._of_id(target)
        remedy = "give 12 to 64 hex digits of a container id, a PID, or a path that begins with '/'"
        asked = f"container {shown(target)}"
        raise BadInput(asked, "neither container id nor PID nor cgroup path", remedy)

    def _of_pid(self, pid: int) -> Resolved:
        if pid == 0:
            raise BadInput("PID 0", "not a PID", "give that of a process in the container")
        paths = self._cgroups.paths_of(pid)
        named = self._named(paths)
        return named if named is not None else self._of_cgroup(self._cgroups.of_pid(pid))

    def _of_cgroup(self, cgroup: Cgroup) -> Resolved:
        paths = {UNIFIED: cgroup.unified, DEVICES: cgroup.devices, FREEZER: cgroup.freezer}
        named = self._named({name: path for name, path in paths.items() if path is not None})
        if named is not None:
            return named
        self._check_no_manager(cgroup)
        text = f"{cgroup.hierarchy}:{cgroup.path}:{cgroup.inode}"
        container_id = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        return container_id, cgroup, "", cgroup.path.rpartition("/")[2]

    def _check_no_manager(self, cgroup: Cgroup) -> None:
        """Raises BadInput where containers of a runtime are, or would be, in the cgroup."""
        asked, remedy = f"cgroup {shown(cgroup.path)}", "give one of its containers"
        last = cgroup.path.rpartition("/")[2]
        if _MANAGER.match(last) or _pod_uid([last]):
            raise BadInput(asked, "it is not one container's but holds those of others", remedy)
        tree = self._trees()[cgroup.hierarchy]
        for path in tree.walk(cgroup.path):
            inner = _container_id(path.rpartition("/")[2])
            if inner:
                raise BadInput(asked, f"container {inner[:12]} is in it", remedy)

    def _named(self, paths: Dict[str, str]) -> Optional[Resolved]:
        """The container that the paths name, at its own cgroup and not one within it."""
        read = {name: read_path(path) for name, path in paths.items()}
        first = read.get(UNIFIED) or read.get(DEVICES)
        if first is None:
            return None
        own = {
            name: found.path
            for name, found in read.items()
            if found is not None and found.container_id == first.container_id
        }
        return first.container_id, self._cgroups.at(own), first.pod_uid, ""

    def _of_id(self, prefix: str) -> Resolved:
        found: Dict[str, Dict[str, str]] = {}
        for name, tree in self._trees().items():
            for path in tree.walk("/"):
                container_id = _container_id(path.rpartition("/")[2])
                if container_id.startswith(prefix):
                    found.setdefault(container_id, {}).setdefault(name, path)
        asked = f"container {shown(prefix)}"
        known = {i: p for i, p in found.items() if UNIFIED in p or DEVICES in p}
        if not known:
            remedy = "see 'docker ps', 'podman ps' or 'crictl ps', or give a PID in it"
            raise NotFound(asked, "no container with this id runs here", remedy)
        if len(known) > 1:
            ids = ", ".join(container_id[:16] for container_id in sorted(known)[:4])
            raise BadInput(asked, f"several containers begin so: {ids}", "give more digits")
        named = self._named(next(iter(known.values())))
        assert named is not None  # the last part of its path is its id
        return named

    def _trees(self) -> Dict[str, Tree]:
        trees: Dict[str, Optional[Tree]] = {
            UNIFIED: self._cgroups.unified,
            DEVICES: self._cgroups.devices,
            FREEZER: self._cgroups.freezer,
        }
        return {name: tree for name, tree in trees.items() if tree is not None}
