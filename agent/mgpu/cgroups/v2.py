"""The unified hierarchy: what is populated, and the device programs attached to its cgroups."""

import errno
import os
from contextlib import contextmanager
from typing import Iterator, List, Optional

from mgpu import bpf
from mgpu.cgroups.tree import Tree


class Unified(Tree):
    """cgroup v2. Attaching and querying programs needs CAP_BPF or CAP_SYS_ADMIN (kernel 4.15)."""

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
        fd = os.open(str(self.directory(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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


def programs_of(cgroup_fd: int) -> List[bpf.ProgramInfo]:
    """The device programs attached to an open cgroup."""
    found = []
    for program_id in bpf.prog_query(cgroup_fd, bpf.ATTACH_CGROUP_DEVICE):
        try:
            program_fd = bpf.prog_by_id(program_id)
        except FileNotFoundError:  # detached, and freed, since the query
            continue
        try:
            found.append(bpf.program_info(program_fd))
        finally:
            os.close(program_fd)
    return found
