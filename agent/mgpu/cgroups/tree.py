"""One mounted cgroup hierarchy as a tree of directories. What both versions have in common.

Paths are relative to the mount and begin with ``/``. Functions raise OSError as the kernel does.
"""

import errno
import os
from pathlib import Path
from typing import Iterator, List, Optional, Set


class Tree:
    """The hierarchy mounted at ``mount``."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount
        self._base = str(mount).rstrip("/")

    def directory(self, path: str) -> Path:
        return self.mount / path.lstrip("/")

    def inode(self, path: str) -> Optional[int]:
        """The inode number of the cgroup, its id in the unified hierarchy; None: not there."""
        try:
            return os.stat(self._base + path).st_ino
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(self, path: str) -> Iterator[str]:
        """``path`` and every cgroup below it, parents first. What vanishes is passed over."""
        yield path
        for name in self.children(path):
            yield from self.walk(f"{path.rstrip('/')}/{name}")

    def children(self, path: str) -> List[str]:
        """The names of the cgroups right below ``path``."""
        try:
            with os.scandir(self._base + path) as entries:
                return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def members(self, path: str) -> List[int]:
        """PIDs in ``path`` and below it, sorted."""
        found: Set[int] = set()
        for each in self.walk(path):
            found.update(self.own_members(each))
        return sorted(found)

    def own_members(self, path: str) -> List[int]:
        """PIDs in this very cgroup; those outside the reader's PID namespace are left out."""
        try:
            with open(f"{self._base}{path}/cgroup.procs") as stream:
                text = stream.read()
        except OSError as error:
            # A threaded cgroup has no list of processes: its domain's has them.
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOTDIR):
                return []
            raise
        return [int(line) for line in text.split() if line != "0"]

    def make(self, path: str) -> None:
        """Make the cgroup and those above it. Raises FileExistsError when it is there."""
        directory = self.directory(path)
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir()

    def add(self, path: str, pid: int) -> None:
        """Move a process in. Raises ProcessLookupError when it is gone."""
        (self.directory(path) / "cgroup.procs").write_text(f"{pid}\n")

    def remove(self, path: str) -> None:
        """Remove the cgroup and those below it. Raises OSError EBUSY while processes are in it."""
        for each in reversed(list(self.walk(path))):
            try:
                self.directory(each).rmdir()
            except FileNotFoundError:
                continue

    def remove_if_empty(self, path: str) -> None:
        """Remove the cgroup unless there is something in it."""
        try:
            self.directory(path).rmdir()
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT):
                raise
