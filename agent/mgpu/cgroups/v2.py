"""The unified hierarchy: what is populated, and the device programs attached to its cgroups."""

import ctypes
import errno
import os
import struct
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Iterator, List, Optional

from mgpu import bpf
from mgpu.cgroups.tree import Tree

_AT_FDCWD = -100
_ID_BYTES = 8
_libc = ctypes.CDLL(None, use_errno=True)


class Unified(Tree):
    """cgroup v2. Attaching and querying programs needs CAP_BPF or CAP_SYS_ADMIN (kernel 4.15)."""

    def __init__(self, mount: Path) -> None:
        super().__init__(mount)
        self._has_ids = (mount / "cgroup.procs").exists()

    def inode(self, path: str) -> Optional[int]:
        """The cgroup's id as BPF programs see it; None: not there.

        That is its inode number from 5.5 on; before, the generation stands above the inode.
        """
        if not self._has_ids or bpf.kernel_version() >= (5, 5):
            return super().inode(path)
        try:
            return _handle(self.directory(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def populated(self, path: str) -> bool:
        """Whether a process is in the cgroup or below it; False for one that is not there."""
        try:
            text = (self.directory(path) / "cgroup.events").read_text()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return False
            raise
        return "populated 1" in text.splitlines()

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """A descriptor of the cgroup's directory. Raises FileNotFoundError when it is gone."""
        fd = os.open(self._base + path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def attached(self, path: str) -> List[bpf.ProgramInfo]:
        """The device programs attached to this very cgroup, in the order they run."""
        with self.opened(path) as fd:
            return programs_of(fd)

    def overridden_by_ours(self, path: str) -> Optional[str]:
        """The cgroup whose program would stop being asked if one were attached to ``path``.

        That is one above, attached with BPF_F_ALLOW_OVERRIDE: it yields to any below it, and the
        kernel lets that happen (kernel/bpf/cgroup.c, compute_effective_progs). None: nobody's.
        """
        where = path
        while True:
            with self.opened(where) as fd:
                if bpf.prog_query(fd, bpf.ATTACH_CGROUP_DEVICE):
                    flags = bpf.attach_flags(fd, bpf.ATTACH_CGROUP_DEVICE)
                    yields = where != path and flags & bpf.F_ALLOW_OVERRIDE
                    return where if yields else None
            if where == "/":
                return None
            where = where.rpartition("/")[0] or "/"


def _handle(directory: Path) -> int:
    """The handle of a file in a kernfs, which is its id. Raises OSError."""
    handle = ctypes.create_string_buffer(struct.pack("<Ii", _ID_BYTES, 0), 8 + _ID_BYTES)
    mount_id = ctypes.c_int()
    where = ctypes.c_char_p(os.fsencode(directory))
    if _libc.name_to_handle_at(_AT_FDCWD, where, handle, ctypes.byref(mount_id), 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return int.from_bytes(handle.raw[8:], "little")


def programs_of(cgroup_fd: int) -> List[bpf.ProgramInfo]:
    """The device programs attached to an open cgroup."""
    found = []
    for program_id in bpf.prog_query(cgroup_fd, bpf.ATTACH_CGROUP_DEVICE):
        try:
            found.append(_program(program_id))
        except FileNotFoundError:  # detached, and freed, since the query
            continue
    return found


@lru_cache(maxsize=1024)
def _program(program_id: int) -> bpf.ProgramInfo:
    """What a program is, which never changes: the kernel gives no id twice."""
    program_fd = bpf.prog_by_id(program_id)
    try:
        return bpf.program_info(program_fd)
    finally:
        os.close(program_fd)
