"""Processes that begin a new program or end, as the kernel's process connector tells at once.

Second-hand: events may be lost when the receiver lags (ENOBUFS), and none come before the start.
Both are told as ``LOST``, upon which the owner looks for itself. Needs CAP_NET_ADMIN, and the
host's network, PID and user namespaces.
"""

import ctypes
import errno
import importlib.util
import os
import select
import socket
import struct
import sys
import threading
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

from mgpu import log
from mgpu.errors import NotCapable

EXEC, EXIT, LOST = "exec", "exit", "lost"

_PROC_EVENT_EXEC = 0x00000002
_PROC_EVENT_EXIT = 0x80000000
_SO_ATTACH_FILTER = 26
_ACK_WAIT_S = 2.0
_AGAIN_S = 5.0
_RECEIVE_BYTES = 1 << 20

# Of struct nlmsghdr (16 bytes), cn_msg (20) and proc_event: what, process_pid, process_tgid.
_WHAT, _PID, _TGID = 36, 52, 56


class ProcEvent(NamedTuple):
    """``kind`` is EXEC, EXIT or LOST; ``pid`` that of the process (0 with LOST)."""

    kind: str
    pid: int


class ProcEvents:
    """A thread that calls ``told`` for each event, one at a time, until ``stop``."""

    def __init__(self, told: Callable[[ProcEvent], None]) -> None:
        self._told = told
        self._socket: Any = None
        self._thread: Optional[threading.Thread] = None
        self._wake: Tuple[int, int] = (-1, -1)

    def start(self) -> None:
        """Subscribe and begin. Raises NotCapable where the kernel does not tell."""
        self._socket = _subscribed()
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="procevents", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it may be started again."""
        if self._thread is None:
            return
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._thread = None
        self._socket.close()
        for fd in self._wake:
            os.close(fd)

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        while not self._told_until_broken():
            log.warning("process-events-broken", note="subscribing anew")
            self._socket.close()
            while True:
                if self._woken(_AGAIN_S):
                    return
                try:
                    self._socket = _subscribed()
                    break
                except NotCapable:
                    continue

    def _told_until_broken(self) -> bool:
        """Tell events until ``stop`` (True) or until the socket fails."""
        self._told(ProcEvent(LOST, 0))
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        poll.register(self._wake[0], select.POLLIN)
        while True:
            if self._wake[0] in [fd for fd, _ in poll.poll()]:
                return True
            try:
                events = _received(self._socket)
            except OSError:
                return False
            for event in events:
                self._told(event)

    def _woken(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._wake[0], select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def _subscribed() -> Any:
    """A socket of pyroute2 that events come in on."""
    asked = "process events"
    cn_proc = _cn_proc()
    try:
        sock = cn_proc.ProcEventSocket()
    except OSError as error:
        reason = f"no process connector ({error.strerror})"
        remedy = "use a kernel with CONFIG_PROC_EVENTS, in the host's network namespace"
        raise NotCapable(asked, reason, remedy) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        _attach_filter(sock.fileno())
        sock.bind()
        _listen(cn_proc, sock)
    except OSError as error:
        sock.close()
        remedy = "run as root with CAP_NET_ADMIN in the host's PID and network namespaces"
        raise NotCapable(asked, f"not told here ({error.strerror})", remedy) from None
    return sock


def _cn_proc() -> Any:
    """pyroute2's process connector without the rest of it.

    pyroute2's own __init__ imports all of its protocols: 34 MB resident against 13 MB so, measured
    with 0.7.12 on Python 3.11 (8 MB is the bare interpreter). So the package is entered without
    its __init__ being run.
    """
    if "pyroute2" not in sys.modules:
        spec = importlib.util.find_spec("pyroute2")
        if spec is None:
            remedy = "install pyroute2"
            raise NotCapable("process events", "the package pyroute2 is missing", remedy)
        sys.modules["pyroute2"] = importlib.util.module_from_spec(spec)
    from pyroute2.netlink.connector import cn_proc  # type: ignore[import-untyped,unused-ignore]

    return cn_proc


def _listen(cn_proc: Any, sock: Any) -> None:
    """Ask for events and wait for the kernel's word: outside the host's namespaces it is silent."""
    message = cn_proc.proc_event_control()
    message["action"] = cn_proc.PROC_CN_MCAST_LISTEN
    message["idx"], message["val"] = cn_proc.CN_IDX_PROC, cn_proc.CN_VAL_PROC
    message["len"] = 4
    sock.put(message, cn_proc.NLMSG_DONE, msg_flags=0, msg_seq=0)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    if not poll.poll(_ACK_WAIT_S * 1000):
        raise OSError(errno.ETIMEDOUT, "no answer of the kernel")
    for answer in sock.marshal.parse(sock.recv(_RECEIVE_BYTES)):
        # The acknowledgement carries the error where an event has its fields.
        if answer["what"] == cn_proc.PROC_EVENT_NONE:
            return


def _received(sock: Any) -> List[ProcEvent]:
    try:
        data = sock.recv(_RECEIVE_BYTES)
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            return [ProcEvent(LOST, 0)]
        raise
    kinds = {_PROC_EVENT_EXEC: EXEC, _PROC_EVENT_EXIT: EXIT}
    return [
        ProcEvent(kinds[message["what"]], message["process_tgid"])
        for message in sock.marshal.parse(data)
        if message["what"] in kinds
    ]


def _instructions() -> List[Tuple[int, int, int, int]]:
    """A socket filter: acknowledgements, exec, and the exit of whole processes.

    A busy host forks more than Python decodes. Classic BPF loads words in network order.
    """
    load, accept = 0x20, 0x40000
    equal, ret, to_x, equal_x = 0x15, 0x06, 0x07, 0x1D
    return [
        (load, 0, 0, _WHAT),
        (equal, 6, 0, 0),
        (equal, 5, 0, socket.htonl(_PROC_EVENT_EXEC)),
        (equal, 0, 5, socket.htonl(_PROC_EVENT_EXIT)),
        (load, 0, 0, _PID),
        (to_x, 0, 0, 0),
        (load, 0, 0, _TGID),
        (equal_x, 0, 1, 0),
        (ret, 0, 0, accept),
        (ret, 0, 0, 0),
    ]


def _attach_filter(fd: int) -> None:
    program = b"".join(struct.pack("=HBBI", *each) for each in _instructions())
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the count, and a pointer at the pointer's alignment.
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    duplicate = socket.socket(fileno=os.dup(fd))
    try:
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
    finally:
        duplicate.close()
