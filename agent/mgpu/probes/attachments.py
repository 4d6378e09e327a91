"""What attaches a program to a probe, kept so that it outlives the agent.

Two ways: links pinned in the BPF file system (kernel 5.15 has them for perf events), or the perf
event's descriptor kept by another process (fdstore.py). Names say what is attached where, so that
a restart finds out what is missing and attaches nothing twice.
"""

import fcntl
import os
from pathlib import Path
from typing import Iterable, Protocol, Set

from mgpu import bpf

PERF_EVENT_IOC_SET_BPF = 0x40042408  # linux/perf_event.h


class Attachments(Protocol):
    """Every method raises OSError as the kernel does."""

    def names(self) -> Set[str]:
        """What is attached, by name, also by earlier runs of the agent."""

    def attach(self, name: str, program_fd: int, event_fd: int) -> None:
        """Attach and keep; ``event_fd`` remains the caller's."""

    def drop(self, names: Iterable[str]) -> None:
        """Detach; names that are not there are passed over."""

    def clear(self) -> None:
        """Detach all, and be done with this way of keeping attachments."""


class PinnedLinks:
    """One pinned link for each probe, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> Set[str]:
        return {entry.name for entry in self._folder.iterdir()}

    def attach(self, name: str, program_fd: int, event_fd: int) -> None:
        link = bpf.link_perf_event(program_fd, event_fd)
        try:
            bpf.obj_pin(link, self._folder / name)
        finally:
            os.close(link)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                (self._folder / name).unlink()
            except FileNotFoundError:
                continue

    def clear(self) -> None:
        self.drop(self.names())


class FdStore(Protocol):
    """Keeps descriptors while the agent is away: fdstore.py."""

    def names(self) -> Set[str]: ...
    def store(self, name: str, fd: int) -> None: ...
    def remove(self, name: str) -> None: ...
    def clear(self) -> None: ...


class KeptEvents:
    """Perf events whose descriptors somebody else keeps open; for kernels before 5.15."""

    def __init__(self, store: FdStore) -> None:
        self._store = store

    def names(self) -> Set[str]:
        return self._store.names()

    def attach(self, name: str, program_fd: int, event_fd: int) -> None:
        fcntl.ioctl(event_fd, PERF_EVENT_IOC_SET_BPF, program_fd)
        self._store.store(name, event_fd)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._store.remove(name)

    def clear(self) -> None:
        self._store.clear()
