"""Talks to the service manager: the datagrams of sd_notify(3), without libsystemd.

Where no manager listens (NOTIFY_SOCKET is not set) every call does nothing.
"""

import array
import os
import socket
import time
from typing import Mapping, Optional, Sequence


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._watchdog_usec = environment.get("WATCHDOG_USEC", "")
        # systemd 254 says how many. An older one may not know FDPOLL=0 (246), and would take the
        # hang-up that poll(2) reports of a perf event without a ring for its end.
        self._store_max = int(environment.get("FDSTORE", "0"))
        self._watchdog_pid = environment.get("WATCHDOG_PID", "")

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=limits are in force")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        self._send("STATUS=" + text)

    def alive(self) -> None:
        """Feed the watchdog. To be called by the loop that does the work, and by nobody else."""
        self._send("WATCHDOG=1")

    @property
    def stores_fds(self) -> bool:
        """Whether this unit may leave descriptors with the manager."""
        return bool(self._address) and self._store_max > 0

    def store_fd(self, name: str, fd: int) -> None:
        """Have the manager keep a copy of ``fd`` until it is removed or the unit stops for good."""
        self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd])

    def remove_fd(self, name: str) -> None:
        self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    @property
    def watchdog_s(self) -> Optional[float]:
        """How often ``alive`` is expected at least; None without a watchdog for this process."""
        if not self._watchdog_usec or self._watchdog_pid not in ("", str(os.getpid())):
            return None
        return int(self._watchdog_usec) / 1_000_000

    def _send(self, message: str, fds: Sequence[int] = ()) -> None:
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):  # an abstract socket
            address = "\0" + address[1:]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            try:
                sender.connect(address)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sender.sendmsg([message.encode()], rights if fds else [])
            except OSError:
                return  # a manager that is gone must not take the agent with it
