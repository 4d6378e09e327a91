"""Perf events that programs are attached to: uprobes and tracepoints (perf_event_open(2))."""

import ctypes
import os
import struct
from pathlib import Path

from mgpu import bpf

_ATTR_BYTES = 128
_TYPE_TRACEPOINT = 2
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
_RETURN_BIT = 0  # the uprobe PMU's format/retprobe: config:0


def tracepoint(event_id: int) -> int:
    """A descriptor of a tracepoint, for all processes; programs see every CPU's events."""
    attr = bytearray(_ATTR_BYTES)
    struct.pack_into("<IIQQ", attr, 0, _TYPE_TRACEPOINT, _ATTR_BYTES, event_id, 1)
    return bpf.perf_event_open(attr, pid=-1, cpu=0)


def uprobe(file_fd: int, offset: int, at_return: bool, pid: int = -1) -> int:
    """A descriptor of a probe at ``offset`` of an open file, in every process that maps it.

    With ``pid`` in that process alone.
    """
    attr = bytearray(_ATTR_BYTES)
    kind = int(_UPROBE_PMU.read_text())
    path = ctypes.create_string_buffer(f"/proc/self/fd/{file_fd}".encode())
    struct.pack_into("<IIQ", attr, 0, kind, _ATTR_BYTES, int(at_return) << _RETURN_BIT)
    struct.pack_into("<QQ", attr, 56, ctypes.addressof(path), offset)  # config1, config2
    return bpf.perf_event_open(attr, pid=pid, cpu=0 if pid < 0 else -1)


def supported() -> bool:
    """Whether this kernel has uprobes for perf (CONFIG_UPROBE_EVENTS)."""
    return os.path.exists(_UPROBE_PMU)
