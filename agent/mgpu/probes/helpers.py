"""Which helpers this kernel lets our programs call, found by loading tiny programs.

Cgroup device programs got the task's id and its cgroup's ancestors in 6.1, tracing programs the
ancestors earlier; distributions bring such things back to older kernels, so a version says little.
"""

import errno
import functools
import os
import struct
from typing import Dict

from mgpu import bpf
from mgpu.errors import NotCapable

# enum bpf_prog_type and enum bpf_func_id of uapi/linux/bpf.h.
_KPROBE, _CGROUP_DEVICE = 2, 15
_GET_CURRENT_PID_TGID, _GET_CURRENT_ANCESTOR_CGROUP_ID = 14, 123


def defines() -> Dict[str, int]:
    """What the sources of bpf/ are told to do without (whose.h, gate.c)."""
    lacking = {
        "MGPU_NO_ANCESTORS": not _allows(_KPROBE, _GET_CURRENT_ANCESTOR_CGROUP_ID),
        "MGPU_GATE_NO_ANCESTORS": not _allows(_CGROUP_DEVICE, _GET_CURRENT_ANCESTOR_CGROUP_ID),
        "MGPU_GATE_NO_TASK_ID": not _allows(_CGROUP_DEVICE, _GET_CURRENT_PID_TGID),
    }
    return {name: 1 for name, lacks in lacking.items() if lacks}


def see_ancestors() -> bool:
    """Whether every program finds the container of a process in a cgroup inside the container's."""
    return not any(name.endswith("NO_ANCESTORS") for name in defines())


@functools.lru_cache(maxsize=None)
def _allows(program_type: int, helper: int) -> bool:
    """Raises NotCapable where no program of the kind can be loaded."""
    move, call, end = 0xB7, 0x85, 0x95
    code = b"".join(
        struct.pack("<BBhi", operation, register, 0, value)
        for operation, register, value in (
            (move, 1, 1),  # r1 = 1: the helper's argument, where it has one
            (call, 0, helper),
            (move, 0, 1),
            (end, 0, 0),
        )
    )
    try:
        os.close(bpf.prog_load(program_type, code, "mgpu_try"))
    except OSError as error:
        if error.errno == errno.EINVAL:  # the verifier: unknown func
            return False
        remedy = "run the agent as root, on a kernel with CONFIG_BPF_SYSCALL"
        raise NotCapable("eBPF", f"no program can be loaded ({error.strerror})", remedy) from None
    return True
