"""Whether probes at returns are safe here: tried on a process of our own.

From kernel 6.11 on (x86-64) the return of a probed function makes a system call, uretprobe(2), and
a seccomp filter that does not know it kills the caller or fails the call, which then crashes. 6.14
and the stable releases of 2025 let it pass every filter. Only a try tells what a distribution's
kernel does.
"""

import ctypes
import mmap
import os
import platform
import signal
import struct
import threading
from typing import List, Sequence, Tuple

from mgpu import log
from mgpu.errors import NotCapable
from mgpu.probes import events

DOUBTFUL_SINCE = (6, 11)
TRIES = 3  # later calls of a function may take another way through the kernel than the first
TIMEOUT_S = 5

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_RET_KILL_PROCESS = 0x80000000
_RET_ALLOW = 0x7FFF0000
_SYSCALLS = (335, 336)  # uretprobe, uprobe
_FUNCTION = b"\x0f\x1f\x44\x00\x00\x31\xc0\xc3"  # nop; xor eax, eax; ret
_libc = ctypes.CDLL(None, use_errno=True)


def require_return_probes(kernel: Tuple[int, int]) -> None:
    """Raises NotCapable where probes at returns would kill processes under seccomp filters."""
    if kernel < DOUBTFUL_SINCE or platform.machine() != "x86_64":
        return
    try:
        survived = survives_return_probe()
    except OSError as error:
        log.warning("return-probes-not-tried", why=error)
        return
    if not survived:
        raise NotCapable(
            "tracker cuda",
            "this kernel kills processes under seccomp filters at the return of a probed function",
            "use a kernel of 6.14 or later (or an update that has its fix), or tracker = nvml",
        )


def survives_return_probe(blocked: Tuple[int, ...] = _SYSCALLS) -> bool:
    """Whether a process whose seccomp filter kills it for ``blocked`` outlives a probed call.

    Raises OSError where the kernel has no such probes or filters.
    """
    code = os.memfd_create("mgpu-try", os.MFD_CLOEXEC)
    try:
        os.write(code, _FUNCTION.ljust(mmap.PAGESIZE, b"\0"))
        go, gone = os.pipe()
        child = os.fork()
        if child == 0:
            _call_when_told(code, go, gone, blocked)
        os.close(go)
        probes: List[int] = []
        try:
            for at_return in (True, False):
                probes.append(events.uprobe(code, 0, at_return, pid=child))
        finally:
            os.close(gone)
            status = os.waitpid(child, 0)[1]
            # The kernel waits long (RCU, 0.1 s) before a probe is gone; nobody else needs to.
            threading.Thread(target=_close, args=(probes,), daemon=True).start()
    finally:
        os.close(code)
    return status == 0


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _call_when_told(code: int, go: int, gone: int, blocked: Tuple[int, ...]) -> None:
    """In the child: runs the function under the filter, and ends."""
    try:
        signal.alarm(TIMEOUT_S)
        os.close(gone)
        memory = _map(code, mmap.PROT_READ | mmap.PROT_EXEC)
        os.read(go, 1)
        _forbid(blocked)
        function = ctypes.CFUNCTYPE(ctypes.c_int)(memory)
        for _ in range(TRIES):
            function()
        os._exit(0)
    finally:
        os._exit(1)


def _map(fd: int, protection: int) -> int:
    _libc.mmap.restype = ctypes.c_void_p
    words = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    _libc.mmap.argtypes = [*words, ctypes.c_long]
    where: int = _libc.mmap(None, mmap.PAGESIZE, protection, mmap.MAP_PRIVATE, fd, 0)
    if where == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return where


def _forbid(numbers: Tuple[int, ...]) -> None:
    """A seccomp filter that kills for these system calls (seccomp(2))."""
    code = [(0x20, 0, 0, 0)]  # load the number
    code += [(0x15, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    code += [(0x06, 0, 0, _RET_ALLOW), (0x06, 0, 0, _RET_KILL_PROCESS)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(text))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")
