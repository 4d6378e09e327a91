"""Tracker `cuda`: uprobes on every libcuda.so that a bound process maps, once for each inode.

A library is found in /proc/PID/maps and opened through /proc/PID/map_files, so that other mount
namespaces and files deleted meanwhile do not matter. Probes are by inode and offset: they are in
force in every process that maps the file, now or later. Some seconds after the last bound process
that maps it has gone they are taken away.
"""

import os
import re
import threading
import time
from pathlib import Path
from typing import Dict, Iterable, NamedTuple, Optional, Set, Tuple

from mgpu import log
from mgpu.probes import events
from mgpu.probes.attachments import Attachments
from mgpu.probes.elf import function_offsets
from mgpu.probes.loader import Loader
from mgpu.probes.slots import NUMBERS
from mgpu.probes.tracepoints import Tracepoints

LIBRARY = re.compile(r"(^|/)libcuda\.so(\.[0-9.]+)?( \(deleted\))?$")
# The kernel takes long to remove a probe (0.2 s each, seen on 6.18), and lets none be made
# meanwhile (event_mutex): jobs that follow each other on one library must not wait for that.
LINGER_S = 4.0
_MAP_LINE = re.compile(r"([0-9a-f]+-[0-9a-f]+) (..x.) \S+ \S+ (\d+)\s+(/.*)$")


def _calls(names: str, entry: str, end: str = "") -> Dict[str, Tuple[str, str]]:
    return dict.fromkeys(names.split(), (entry, end))


# Function of libcuda -> program at its entry, program at its return.
CALLS: Dict[str, Tuple[str, str]] = {
    **_calls("cuMemAlloc cuMemAlloc_v2 cuMemAllocManaged", "mgpu_alloc", "mgpu_alloc_end"),
    **_calls("cuMemAllocAsync cuMemAllocAsync_ptsz", "mgpu_alloc_pool", "mgpu_alloc_end"),
    **_calls(
        "cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz", "mgpu_alloc_from", "mgpu_alloc_end"
    ),
    **_calls("cuMemPoolCreate", "mgpu_pool", "mgpu_pool_end"),
    **_calls("cuMemGetDefaultMemPool cuMemGetMemPool", "mgpu_pool_at", "mgpu_pool_end"),
    **_calls("cuDeviceGetDefaultMemPool cuDeviceGetMemPool", "mgpu_pool_of", "mgpu_pool_end"),
    **_calls("cuMemAllocPitch cuMemAllocPitch_v2", "mgpu_pitch", "mgpu_alloc_end"),
    **_calls("cuArrayCreate cuArrayCreate_v2", "mgpu_array", "mgpu_alloc_end"),
    **_calls("cuArray3DCreate cuArray3DCreate_v2", "mgpu_array3d", "mgpu_alloc_end"),
    **_calls("cuMipmappedArrayCreate", "mgpu_mipmap", "mgpu_alloc_end"),
    **_calls("cuMemCreate", "mgpu_create", "mgpu_alloc_end"),
    **_calls(
        "cuMemFree cuMemFree_v2 cuMemFreeAsync cuMemFreeAsync_ptsz cuArrayDestroy "
        "cuMipmappedArrayDestroy",
        "mgpu_free",
        "mgpu_free_end",
    ),
    **_calls("cuMemRelease", "mgpu_release", "mgpu_free_end"),
    **_calls("cuMemRetainAllocationHandle", "mgpu_retain", "mgpu_retain_end"),
    **_calls("cuMemMap cuMemMap_ptsz", "mgpu_map", "mgpu_map_end"),
    **_calls("cuMemUnmap", "mgpu_unmap", "mgpu_unmap_end"),
    **_calls("cuCtxPushCurrent cuCtxPushCurrent_v2", "mgpu_ctx_push"),
    **_calls("cuCtxSetCurrent", "mgpu_ctx_set"),
    **_calls("cuCtxPopCurrent cuCtxPopCurrent_v2", "mgpu_ctx_pop"),
    **_calls("cuCtxCreate cuCtxCreate_v2", "mgpu_ctx_create", "mgpu_ctx_create_end"),
    **_calls("cuCtxCreate_v3", "mgpu_ctx_create3", "mgpu_ctx_create_end"),
    **_calls("cuCtxCreate_v4", "mgpu_ctx_create4", "mgpu_ctx_create_end"),
    **_calls("cuCtxDestroy cuCtxDestroy_v2", "mgpu_ctx_destroy", "mgpu_ctx_destroy_end"),
    **_calls("cuDevicePrimaryCtxRetain", "mgpu_primary", "mgpu_primary_end"),
    **_calls(
        "cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2",
        "mgpu_primary_drop",
        "mgpu_primary_drop_end",
    ),
    **_calls(
        "cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2",
        "mgpu_primary_reset",
        "mgpu_primary_drop_end",
    ),
    **_calls("cuDeviceGetUuid cuDeviceGetUuid_v2", "mgpu_uuid", "mgpu_uuid_end"),
}
TRACEPOINTS = {
    "sched/sched_process_free": "mgpu_task_freed",
    "sched/sched_process_exit": "mgpu_task_exit",
    "sched/sched_process_exec": "mgpu_task_exec",
    "sched/sched_process_fork": "mgpu_task_fork",
    "cgroup/cgroup_attach_task": "mgpu_task_attach",
}


class Inode(NamedTuple):
    """What tells a library from another, whatever its path."""

    device: int
    number: int

    @property
    def prefix(self) -> str:
        return f"u-{self.device:x}-{self.number:x}-"


class Probe(NamedTuple):
    """A program at an offset of the file, at the entry or the return of a function."""

    program: str
    offset: int
    at_return: bool

    @property
    def suffix(self) -> str:
        return f"{self.offset:x}-{'r' if self.at_return else 'e'}-{_number(self.program)}"


class CudaTracker:
    """Owns the attachments of tracker `cuda`. Safe to use from several threads."""

    def __init__(
        self,
        loader: Loader,
        attachments: Attachments,
        tracepoints: Tracepoints,
        proc_root: Path = Path("/proc"),
        linger_s: float = LINGER_S,
    ) -> None:
        self._linger_s = linger_s
        self._unused_since: Dict[Inode, float] = {}
        self._loader = loader
        self._attachments = attachments
        self._tracepoints = tracepoints
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._users: Dict[Inode, Set[int]] = {}
        self._kept: Set[Inode] = set()
        self._complete: Set[Inode] = set()
        self._unusable: Set[Inode] = set()
        self._expected: Set[str] = set()
        self._renewing = False

    def start(self) -> None:
        """Attach the tracepoints."""
        there = self._attachments.names()
        for tracepoint, program in TRACEPOINTS.items():
            event_id = self._tracepoints.event_id(tracepoint)
            name = self._name(f"t-{tracepoint.replace('/', '-')}-{_number(program)}")
            self._expected.add(name)
            if name not in there:
                self._attach(name, program, events.tracepoint(event_id))

    def finish(self) -> None:
        """Take away what leads to other maps than ours (loader.py: another layout)."""
        ours = self._name("")
        self._attachments.drop([n for n in self._attachments.names() if not n.startswith(ours)])
        self._renewing = False

    def lost(self) -> bool:
        """Whether attachments have gone without us: the keeper was killed, a pin removed."""
        with self._lock:  # not while another thread is amid attaching
            missing = self._expected - self._attachments.names()
        if missing and not self._renewing:
            log.error("attachments-lost", count=len(missing))
        return bool(missing) or self._renewing

    def renew(self) -> None:
        """Cut off what is attached and begin anew; ``keep``, ``sync`` and ``finish`` follow.

        What the kernel still has of a killed keeper goes slowly, and would count beside the new.
        """
        with self._lock:
            self._renewing = True
            self._loader.renew_slots()
            self._expected.clear()
            self._complete.clear()
        self.start()

    def keep(self, paths: Iterable[Path]) -> None:
        """Attach to these libraries and stay, whoever maps them; to others no longer for that."""
        with self._lock:
            kept = set()
            for path in paths:
                inode = self._attach_file(path)
                if inode is not None:
                    kept.add(inode)
            self._kept = kept
            self._drop_unused()

    def sync(self, pids: Iterable[int]) -> None:
        """Attach to every libcuda that these processes map."""
        with self._lock:
            for pid in pids:
                for inode, path in self._libraries(pid).items():
                    if inode not in self._unusable and self._attach_file(path) is not None:
                        self._users.setdefault(inode, set()).add(pid)
            self._drop_unused()

    def forget(self, pids: Iterable[int]) -> None:
        """These processes are gone or no container's any more."""
        gone = set(pids)
        with self._lock:
            for users in self._users.values():
                users -= gone
            self._drop_unused()

    def users(self) -> Set[int]:
        """Processes known to map a probed library."""
        with self._lock:
            return set().union(*self._users.values()) if self._users else set()

    def inodes(self) -> Set[Inode]:
        """The libraries that are probed now, by these programs."""
        found = set()
        for name in self._attachments.names():
            match = re.match(re.escape(self._name("u-")) + "([0-9a-f]+)-([0-9a-f]+)-", name)
            if match:
                found.add(Inode(int(match.group(1), 16), int(match.group(2), 16)))
        return found

    def detach(self) -> None:
        """Take every probe away."""
        with self._lock:
            self._attachments.drop(self._attachments.names())
            self._users.clear()
            self._kept.clear()
            self._complete.clear()
            self._expected.clear()

    def _drop_unused(self) -> None:
        """Take the probes from libraries that have had no user for a while."""
        there = self.inodes()
        unused = {i for i in there if not self._users.get(i) and i not in self._kept}
        now = time.monotonic()
        self._unused_since = {i: self._unused_since.get(i, now) for i in unused}
        for inode, since in self._unused_since.items():
            if now - since >= self._linger_s:
                self._users.pop(inode, None)
                self._complete.discard(inode)
                self._drop(self._of_inode(inode, self._attachments.names()))

    def _libraries(self, pid: int) -> Dict[Inode, Path]:
        """The libcuda files that a process maps, each with a path that opens it."""
        found: Dict[Inode, Path] = {}
        folder = self._proc_root / str(pid)
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
        except OSError:
            return found  # it is gone
        for line in lines:
            match = _MAP_LINE.match(line)
            if not match or not LIBRARY.search(match.group(4)):
                continue
            inside = folder / "root" / match.group(4).split(" (deleted)")[0].lstrip("/")
            for path in (folder / "map_files" / match.group(1), inside):
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                found.setdefault(Inode(status.st_dev, status.st_ino), path)
                break
        return found

    def _attach_file(self, path: Path) -> Optional[Inode]:
        """Attach to one library where it is not yet; None where it cannot be."""
        try:
            fd = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
        except ProcessLookupError:
            return None  # the process that mapped it is gone
        except OSError as error:
            log.warning("library-not-readable", path=path, why=error)
            return None
        try:
            status = os.fstat(fd)
            inode = Inode(status.st_dev, status.st_ino)
            return self._attach_inode(inode, fd, path)
        finally:
            os.close(fd)

    def _attach_inode(self, inode: Inode, fd: int, path: Path) -> Optional[Inode]:
        if inode in self._unusable:
            return None
        if inode in self._complete:
            return inode
        there = self._of_inode(inode, self._attachments.names())
        try:
            wanted = self._probes(inode, function_offsets(Path(f"/proc/self/fd/{fd}")))
        except (OSError, ValueError) as error:
            return self._give_up(inode, path, error)
        self._expected.update(wanted)
        for name in [name for name in wanted if name not in there]:
            probe = wanted[name]
            try:
                event = events.uprobe(fd, probe.offset, probe.at_return)
            except OSError as error:
                return self._give_up(inode, path, error)
            self._attach(name, probe.program, event)
        self._drop(there - set(wanted))
        self._complete.add(inode)
        log.event("library-probed", path=path, inode=inode.number, probes=len(wanted))
        return inode

    def _give_up(self, inode: Inode, path: Path, why: Exception) -> Optional[Inode]:
        """This file cannot be probed; half a set of probes would count wrongly."""
        self._unusable.add(inode)
        self._drop(self._of_inode(inode, self._expected | self._attachments.names()))
        log.error("library-not-probed", path=path, why=why)
        return None

    def _probes(self, inode: Inode, offsets: Dict[str, int]) -> Dict[str, Probe]:
        """By name, one for each place in the file; returns first.

        An entry must never be counted whose return would not be.
        """
        places: Dict[int, Tuple[str, str]] = {}
        for function, programs in CALLS.items():
            if function in offsets:
                places[offsets[function]] = programs
        if not places:
            raise ValueError("it has none of the functions of libcuda")
        probes = [Probe(end, at, True) for at, (_, end) in places.items() if end]
        probes += [Probe(entry, at, False) for at, (entry, _) in places.items()]
        return {self._name(inode.prefix) + probe.suffix: probe for probe in probes}

    def _of_inode(self, inode: Inode, names: Iterable[str]) -> Set[str]:
        prefix = self._name(inode.prefix)
        return {name for name in names if name.startswith(prefix)}

    def _drop(self, names: Set[str]) -> None:
        self._expected -= names
        self._attachments.drop(names)

    def _attach(self, name: str, program: str, event_fd: int) -> None:
        try:
            self._attachments.attach(name, self._loader.slots.jump(program), event_fd)
        finally:
            os.close(event_fd)

    def _name(self, name: str) -> str:
        return f"{self._loader.slots.identity}-{name}"


def _number(program: str) -> int:
    return NUMBERS[program][1]
