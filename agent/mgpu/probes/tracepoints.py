"""The kernel's tracepoints: their ids, and where the fields lie that the programs read.

Offsets differ between kernels, so they are read from the ``format`` files of tracefs
(Documentation/trace/events.rst) and compiled in.
"""

import re
from pathlib import Path
from typing import Dict, Sequence, Tuple

from mgpu import bpf
from mgpu.errors import NotCapable

# The name in bpf/process.c -> tracepoint, field
FIELDS: Dict[str, Tuple[str, str]] = {
    "FREE_PID": ("sched/sched_process_free", "pid"),
    "EXEC_PID": ("sched/sched_process_exec", "pid"),
    "EXEC_OLD_PID": ("sched/sched_process_exec", "old_pid"),
    "FORK_CHILD": ("sched/sched_process_fork", "child_pid"),
    "ATTACH_ROOT": ("cgroup/cgroup_attach_task", "dst_root"),
    "ATTACH_ID": ("cgroup/cgroup_attach_task", "dst_id"),
    "ATTACH_PID": ("cgroup/cgroup_attach_task", "pid"),
}
PLACES = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))


class Tracepoints:
    """Reads tracefs, which is mounted where it is not."""

    def __init__(self, places: Sequence[Path] = PLACES) -> None:
        self._places = places

    def offsets(self) -> Dict[str, int]:
        """Offset in bytes by name, for all of FIELDS. Raises NotCapable."""
        return {name: self._offset(*where) for name, where in FIELDS.items()}

    def event_id(self, tracepoint: str) -> int:
        """The number by which perf_event_open(2) knows ``group/name``."""
        return int(self._read(tracepoint, "id"))

    def _offset(self, tracepoint: str, field: str) -> int:
        match = re.search(rf"\b{field};\s*offset:(\d+);", self._read(tracepoint, "format"))
        if match is None:
            raise NotCapable(
                f"tracepoint {tracepoint}", f"has no field {field} here", "report your kernel"
            )
        return int(match.group(1))

    def _read(self, tracepoint: str, name: str) -> str:
        for place in self._mounted():
            path = place / "events" / tracepoint / name
            if path.exists():
                return path.read_text()
        raise NotCapable(
            f"tracepoint {tracepoint}",
            "tracefs does not show it",
            "mount -t tracefs tracefs /sys/kernel/tracing (needs CONFIG_FTRACE)",
        )

    def _mounted(self) -> Sequence[Path]:
        found = [place for place in self._places if (place / "events").is_dir()]
        if not found and self._places and self._places[0].is_dir():
            try:
                bpf.mount("tracefs", self._places[0])
            except OSError:
                return []
            found = [self._places[0]]
        return found
