"""Listening sockets of the agent: the API's unix socket and the TCP one of /metrics.

A unix socket appears under its path complete, with its owner and mode, or not at all: it is made
in a private folder beside it and renamed, so there is no moment in which others could connect.
"""

import errno
import grp
import os
import shutil
import socket
import stat
import struct
import tempfile
from typing import Optional

from mgpu import log
from mgpu.errors import AlreadyRunning, ConfigInvalid, NotPermitted
from mgpu.ports import Peer

SOCKET_MODE = 0o660
BACKLOG = 512
SUN_PATH_BYTES = 107
PRIVATE_PREFIX = ".mgpu-socket-"
_UCRED = struct.Struct("3i")


def peer_of(connection: socket.socket) -> Optional[Peer]:
    """The peer of a unix connection; None for TCP, where the kernel knows nobody."""
    if connection.family != socket.AF_UNIX:
        return None
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(raw))


def unix_socket(path: str, group: str) -> socket.socket:
    """Listen at ``path``, readable and writable for root and ``group`` alone.

    A stale socket is replaced. Raises AlreadyRunning when somebody answers there, ConfigInvalid
    when the path is something else, too long or in a folder that cannot be made.
    """
    asked = f"socket {path}"
    if len(os.fsencode(path)) > SUN_PATH_BYTES:
        reason = f"longer than the {SUN_PATH_BYTES} bytes of a unix address"
        raise ConfigInvalid(asked, reason, "set a shorter socket= in agent.conf")
    _refuse_if_taken(path)
    folder = os.path.dirname(os.path.abspath(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        _bind_and_rename(listener, folder, path, _group_id(group))
    except PermissionError as error:
        listener.close()
        raise NotPermitted(asked, str(error), "run the agent as root") from error
    except OSError as error:
        listener.close()
        raise ConfigInvalid(asked, str(error), "set another socket= in agent.conf") from error
    return listener


def remove_socket(path: str, inode: int) -> None:
    """Take the socket file away if it is still the one with this inode."""
    try:
        if os.lstat(path).st_ino == inode:
            os.unlink(path)
    except FileNotFoundError:
        return


def tcp_socket(host: str, port: int) -> socket.socket:
    """Listen at ``host`` (IPv4, IPv6 or a name) and ``port``; port 0 takes a free one.

    Raises ConfigInvalid when it is no address of this node or the port is taken.
    """
    asked = f"metrics_listen {f'[{host}]' if ':' in host else host}:{port}"
    remedy = "set another metrics_listen= in agent.conf, or leave it empty"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigInvalid(asked, error.strerror or str(error), remedy) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "the port is taken by another program" if taken else error.strerror or str(error)
        raise ConfigInvalid(asked, reason, remedy) from error
    return listener


def _refuse_if_taken(path: str) -> None:
    asked = f"socket {path}"
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISSOCK(mode):
        reason = "the path is taken by something that is not a socket"
        raise ConfigInvalid(asked, reason, "remove it or set another socket= in agent.conf")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass
    raise AlreadyRunning(asked, "another agent answers there", "stop it first")


def _bind_and_rename(listener: socket.socket, folder: str, path: str, gid: int) -> None:
    for entry in os.listdir(folder):
        if entry.startswith(PRIVATE_PREFIX):  # an agent was killed in the middle of this
            shutil.rmtree(os.path.join(folder, entry), ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PRIVATE_PREFIX, dir=folder) as private:
        handle = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Through the descriptor: the private folder's own path may be too long to bind.
            listener.bind(f"/proc/self/fd/{handle}/s")
        finally:
            os.close(handle)
        made = os.path.join(private, "s")
        os.chmod(made, SOCKET_MODE)
        if os.geteuid() == 0:
            os.chown(made, 0, gid)
        listener.listen(BACKLOG)
        os.rename(made, path)


def _group_id(group: str) -> int:
    if group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        log.warning("no-such-group", group=group, effect="only root may use the API")
        return 0
