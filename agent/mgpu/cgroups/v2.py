"""The unified hierarchy: what is populated, and the device programs attached to its cgroups."""

import errno
import os
from contextlib import contextmanager
from typing import Iterator, List

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
