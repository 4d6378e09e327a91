"""Tells at once when a process maps a library, so that no call to it goes by uncounted.

A software event on each CPU that counts nothing reports every executable mapping
(PERF_RECORD_MMAP2, perf_event_open(2)) into a ring that this module reads.
"""

import mmap
import os
import select
import struct
import threading
from typing import Callable, Iterator, List, NamedTuple

from mgpu import bpf, log

_ATTR_BYTES = 128
_TYPE_SOFTWARE = 1
_COUNT_SW_DUMMY = 9
_FLAG_MMAP = 1 << 8
_FLAG_WATERMARK = 1 << 14
_FLAG_MMAP2 = 1 << 23
_RECORD_LOST = 2
_RECORD_MMAP2 = 10
_MMAP2_NAME = 72  # offset of the file name in the record
_DATA_PAGES = 64
_HEAD, _TAIL = 1024, 1032  # in struct perf_event_mmap_page

Mapped = Callable[[int, str], None]


class Record(NamedTuple):
    """A mapping; ``path`` is empty where the ring was full and records were lost."""

    pid: int
    path: str


LOST = Record(0, "")


class _Ring:
    """One CPU's ring."""

    def __init__(self, cpu: int) -> None:
        attr = bytearray(_ATTR_BYTES)
        flags = _FLAG_MMAP | _FLAG_MMAP2 | _FLAG_WATERMARK
        struct.pack_into("<IIQ", attr, 0, _TYPE_SOFTWARE, _ATTR_BYTES, _COUNT_SW_DUMMY)
        struct.pack_into("<QI", attr, 40, flags, 1)  # one byte wakes the reader
        self.fd = bpf.perf_event_open(attr, pid=-1, cpu=cpu)
        self._data_bytes = _DATA_PAGES * mmap.PAGESIZE
        try:
            self._memory = mmap.mmap(self.fd, mmap.PAGESIZE + self._data_bytes)
        except OSError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def records(self) -> Iterator[Record]:
        """What has come since the last call, LOST in place of what came too fast for the ring."""
        (head,) = struct.unpack_from("<Q", self._memory, _HEAD)
        (tail,) = struct.unpack_from("<Q", self._memory, _TAIL)
        while tail < head:
            kind, _, size = struct.unpack("<IHH", self._read(tail, 8))
            if kind == _RECORD_MMAP2:
                yield _parse(self._read(tail, size))
            elif kind == _RECORD_LOST:
                yield LOST
            tail += size
        struct.pack_into("<Q", self._memory, _TAIL, tail)

    def _read(self, position: int, size: int) -> bytes:
        at = position % self._data_bytes
        first = self._memory[mmap.PAGESIZE + at : mmap.PAGESIZE + min(at + size, self._data_bytes)]
        rest = size - len(first)
        return first + self._memory[mmap.PAGESIZE : mmap.PAGESIZE + rest] if rest else first


def _parse(record: bytes) -> Record:
    (pid,) = struct.unpack_from("<I", record, 8)
    name = record[_MMAP2_NAME:].split(b"\0")[0]
    return Record(pid, os.fsdecode(name))


class Mappings:
    """Calls ``mapped(pid, path)`` in a thread of its own for every executable mapping of a file.

    ``lost()`` where the kernel could not tell of some: then everybody is to be looked at again.
    """

    def __init__(self, mapped: Mapped, lost: Callable[[], None]) -> None:
        self._mapped = mapped
        self._lost = lost
        self._rings: List[_Ring] = []
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mgpu-mappings", daemon=True)

    def start(self) -> None:
        """Raises OSError where the kernel does not let us look."""
        for cpu in _online_cpus():
            self._rings.append(_Ring(cpu))
        self._thread.start()

    def stop(self) -> None:
        os.close(self._waker)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wake)
        for ring in self._rings:
            ring.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, 0)
        for ring in self._rings:
            poller.register(ring.fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if self._wake in ready:
                return
            for ring in self._rings:
                if ring.fd in ready:
                    self._report(ring)

    def _report(self, ring: _Ring) -> None:
        for record in ring.records():
            try:
                if record is LOST:
                    self._lost()
                elif record.path.startswith("/"):  # not [vdso] and the like
                    self._mapped(record.pid, record.path)
            except Exception:
                log.fault("mapping-not-looked-at", pid=record.pid, path=record.path)


def _online_cpus() -> List[int]:
    """The numbers in /sys/devices/system/cpu/online, such as 0-3,8."""
    cpus: List[int] = []
    with open("/sys/devices/system/cpu/online") as stream:
        for part in stream.read().strip().split(","):
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return cpus
