"""Where programs hang: what is attached to a probe only jumps to the program that counts now.

A program is put in place of another by one write to an array of programs (bpf_tail_call), so every
call that a probe sees is counted by exactly one of them: with two programs attached side by side a
switch between them could come in the middle of a hit, which then counts twice or not at all. What
is attached stays as it is over every upgrade of the agent.
"""

import os
import struct
from ctypes import c_uint32
from typing import Callable, Dict, List, Mapping, Tuple

from mgpu import bpf
from mgpu.probes.layout import MapSpec

SIZE = 128
ARRAYS: Dict[str, MapSpec] = {
    kind: MapSpec(bpf.MAP_TYPE_PROG_ARRAY, c_uint32, c_uint32, SIZE)
    for kind in ("probe_slots", "tracepoint_slots")
}
_KINDS = {
    "probe_slots": bpf.PROG_TYPE_KPROBE,
    "tracepoint_slots": bpf.PROG_TYPE_TRACEPOINT,
}
# The numbers are for ever: attachments made by other versions carry them. Append only.
PROBES: Tuple[str, ...] = (
    "mgpu_alloc",
    "mgpu_alloc_pool",
    "mgpu_pitch",
    "mgpu_array",
    "mgpu_array3d",
    "mgpu_mipmap",
    "mgpu_alloc_end",
    "mgpu_create",
    "mgpu_free",
    "mgpu_release",
    "mgpu_free_end",
    "mgpu_retain",
    "mgpu_retain_end",
    "mgpu_map",
    "mgpu_map_end",
    "mgpu_unmap",
    "mgpu_unmap_end",
    "mgpu_ctx_push",
    "mgpu_ctx_set",
    "mgpu_ctx_pop",
    "mgpu_ctx_create",
    "mgpu_ctx_create3",
    "mgpu_ctx_create4",
    "mgpu_ctx_create_end",
    "mgpu_primary",
    "mgpu_primary_end",
    "mgpu_ctx_destroy",
    "mgpu_ctx_destroy_end",
    "mgpu_primary_drop",
    "mgpu_primary_reset",
    "mgpu_primary_drop_end",
    "mgpu_uuid",
    "mgpu_uuid_end",
    "mgpu_alloc_from",
    "mgpu_pool",
    "mgpu_pool_at",
    "mgpu_pool_of",
    "mgpu_pool_end",
)
TRACEPOINTS: Tuple[str, ...] = (
    "mgpu_task_freed",
    "mgpu_task_exit",
    "mgpu_task_exec",
    "mgpu_task_fork",
    "mgpu_task_attach",
)
NUMBERS: Dict[str, Tuple[str, int]] = {
    **{name: ("probe_slots", number) for number, name in enumerate(PROBES)},
    **{name: ("tracepoint_slots", number) for number, name in enumerate(TRACEPOINTS)},
}
_U32 = struct.Struct("<I")
_TAIL_CALL = 12  # enum bpf_func_id


class Slots:
    """The arrays of programs, which the loader has made and pinned."""

    def __init__(self, maps: Mapping[str, bpf.Map]) -> None:
        self._maps = maps
        self._jumps: Dict[str, int] = {}

    @property
    def identity(self) -> str:
        """Tells these arrays from any others since boot: what is attached jumps into them."""
        return f"{self._maps['probe_slots'].info.map_id:x}"

    def install(self, program: Callable[[str], int]) -> List[str]:
        """Let the programs that ``program`` gives count; the names of those that did not yet."""
        changed = []
        for name, (array, number) in NUMBERS.items():
            fd = program(name)
            now = self._maps[array].lookup(_U32.pack(number))
            if now is None or _U32.unpack(now)[0] != bpf.program_info(fd).program_id:
                self._maps[array].update(_U32.pack(number), _U32.pack(fd))
                changed.append(name)
        return changed

    def jump(self, name: str) -> int:
        """The descriptor of what is attached for program ``name``; ours, do not close it."""
        if name not in self._jumps:
            array, number = NUMBERS[name]
            code = _jump(self._maps[array].fd, number)
            self._jumps[name] = bpf.prog_load(_KINDS[array], code, "mgpu_jump")
        return self._jumps[name]

    def close(self) -> None:
        for fd in self._jumps.values():
            os.close(fd)
        self._jumps.clear()


def _jump(array_fd: int, number: int) -> bytes:
    """bpf_tail_call(ctx, array, number); return 0"""
    instruction = struct.Struct("<BBhi").pack
    return b"".join(
        (
            instruction(0x18, 1 << 4 | 2, 0, array_fd),  # r2 = the array (BPF_PSEUDO_MAP_FD)
            instruction(0, 0, 0, 0),
            instruction(0xB7, 3, 0, number),  # r3 = number
            instruction(0x85, 0, 0, _TAIL_CALL),
            instruction(0xB7, 0, 0, 0),  # r0 = 0
            instruction(0x95, 0, 0, 0),
        )
    )
