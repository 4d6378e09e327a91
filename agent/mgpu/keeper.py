"""The keeper: holds descriptors so that what they stand for outlives the agent. Nothing else.

``python -m mgpu.keeper SOCKET`` serves until it is told to stop. It is used where no service
manager keeps descriptors and the kernel cannot pin probes (before 5.15). It imports nothing of
mgpu, so that an upgrade of the agent never needs it to restart.
"""

import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, Dict, List, Tuple

MESSAGE_BYTES = 65536
CLIENT_TIMEOUT_S = 5.0


class Keeper:
    """Descriptors by name, and the socket that they come by."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: Dict[str, int] = {}
        self._stopping = False

    def serve(self) -> None:
        """Until told to stop. A second keeper for the same path returns at once."""
        lock = os.open(self._path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Not flock(2): the kernel drops that of a killed keeper only after all its probes, of
            # which each takes 0.1 s to close.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if os.path.lexists(self._path):
            os.unlink(self._path)  # left by a keeper that was killed: the lock says so
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.umask(0o177)
        listener.bind(self._path)
        listener.listen(16)
        while not self._stopping:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(CLIENT_TIMEOUT_S)
                try:
                    self._answer(connection)
                except (OSError, ValueError, KeyError) as error:
                    print(f"mgpu-keeper: request refused: {error!r}", file=sys.stderr)
        os.unlink(self._path)
        os.unlink(self._path + ".lock")

    def _answer(self, connection: socket.socket) -> None:
        request, fds = _receive(connection)
        verb, name = request["verb"], request.get("name", "")
        if verb == "store" and len(fds) == 1:
            self._close(name)
            self._kept[name] = fds.pop()
        elif verb == "remove":
            self._close(name)
        elif verb == "stop":
            self._stopping = True
        for fd in fds:
            os.close(fd)
        answer = json.dumps({"names": sorted(self._kept) if verb == "names" else []}).encode()
        for at in range(0, len(answer), MESSAGE_BYTES // 4):
            connection.sendall(answer[at : at + MESSAGE_BYTES // 4])

    def _close(self, name: str) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)


def _receive(connection: socket.socket) -> Tuple[Dict[str, Any], List[int]]:
    data, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(4 * 4))
    fds: List[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += [
                number for (number,) in struct.iter_unpack("i", payload[: len(payload) // 4 * 4])
            ]
    for fd in fds:
        os.set_inheritable(fd, False)
    return json.loads(data), fds


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Keeper(sys.argv[1]).serve()
