"""Keeps descriptors open while the agent is away: with systemd, or with a small process of ours.

systemd keeps what is sent to it with FDSTORE=1 and hands it back at the next start
(sd_notify(3), sd_listen_fds(3)). Elsewhere keeper.py does the same over a unix socket.
"""

import array
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Set

from mgpu.errors import NotCapable
from mgpu.sdnotify import ServiceManager

LISTEN_FDS_START = 3
START_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
MESSAGE_BYTES = 65536
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit machines


class SystemdStore:
    """The descriptor store of the unit (FileDescriptorStoreMax=)."""

    def __init__(
        self, manager: ServiceManager, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._manager = manager
        self._names: Set[str] = set()
        if environment.get("LISTEN_PID") == str(os.getpid()):
            names = environment.get("LISTEN_FDNAMES", "").split(":")
            for at in range(int(environment.get("LISTEN_FDS", "0"))):
                os.close(LISTEN_FDS_START + at)  # systemd has its own copy
            self._names = {name for name in names if name}

    def names(self) -> Set[str]:
        return set(self._names)

    def store(self, name: str, fd: int) -> None:
        self._manager.store_fd(name, fd)
        self._names.add(name)

    def remove(self, name: str) -> None:
        self._manager.remove_fd(name)
        self._names.discard(name)

    def clear(self) -> None:
        for name in self.names():
            self.remove(name)


class KeeperStore:
    """The keeper process behind ``path``, started when it is not there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> Set[str]:
        return set(self._ask({"verb": "names"})["names"])

    def store(self, name: str, fd: int) -> None:
        self._ask({"verb": "store", "name": name}, [fd])

    def remove(self, name: str) -> None:
        self._ask({"verb": "remove", "name": name})

    def is_running(self) -> bool:
        try:
            connection = self._connect()
        except OSError:
            return False
        with connection:
            _exchange(connection, {"verb": "names"}, [])
        return True

    def clear(self) -> None:
        """End the keeper, and with it everything it keeps; nothing happens where none runs."""
        try:
            connection = self._connect()
        except OSError:
            return
        with connection:
            _exchange(connection, {"verb": "stop"}, [])

    def _ask(self, request: Dict[str, str], fds: Optional[List[int]] = None) -> Dict[str, Any]:
        try:
            connection = self._connect()
        except OSError:
            connection = self._start()
        with connection:
            return _exchange(connection, request, fds or [])

    def _connect(self) -> socket.socket:
        """Raises OSError where no keeper lives: a killed one's socket stays open for a while."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.connect(str(self._path))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(peer)[0] != self._living():
                raise ConnectionRefusedError("the keeper behind this socket is dead")
        except OSError:
            connection.close()
            raise
        return connection

    def _living(self) -> int:
        """The PID of the keeper that holds the lock; 0: none. Raises OSError."""
        with open(str(self._path) + ".lock", "rb+") as lock:
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _LOCK.unpack(fcntl.fcntl(lock, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else pid

    def _start(self) -> socket.socket:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        subprocess.Popen(
            [sys.executable, "-S", "-m", "mgpu.keeper", str(self._path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                return self._connect()
            except OSError:
                time.sleep(0.02)
        raise NotCapable(
            "attachments fds",
            "the keeper process does not answer",
            f"see whether {self._path} can be made",
        )


def _exchange(connection: socket.socket, request: Dict[str, str], fds: List[int]) -> Dict[str, Any]:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(request).encode()], ancillary)
    parts = []
    while True:
        part = connection.recv(MESSAGE_BYTES)
        if not part:
            break
        parts.append(part)
    if not parts:
        raise ConnectionResetError("the keeper went away")
    answer: Dict[str, Any] = json.loads(b"".join(parts))
    return answer
