"""A stand-in for systemd: its notify socket, and its store of descriptors over restarts."""

import array
import os
import socket
import subprocess
import threading

from tests.lab import BIN

# Puts the descriptors where sd_listen_fds(3) says, and becomes the agent.
LAUNCH = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 500) for fd in sys.argv[1].split(",") if fd]
for at, fd in enumerate(fds):
    os.dup2(fd, 3 + at)
os.closerange(500, 1000)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)))
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServiceManager:
    """Receives sd_notify(3) messages in a thread; ``messages`` has all but those of the store."""

    def __init__(self, folder):
        self.path = folder / "notify"
        self.messages = []
        self.stored = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", str(self.path))
        self._thread.join()
        self._socket.close()
        for _, fd in self.stored:
            os.close(fd)

    def environment(self):
        return {
            "NOTIFY_SOCKET": str(self.path),
            "FDSTORE": "16384",
            "WATCHDOG_USEC": "600000",
            "LISTEN_FDNAMES": ":".join(name for name, _ in self.stored),
        }

    def start(self, node):
        """Start the agent as its unit would, with what it left here."""
        fds = [fd for _, fd in self.stored]
        words = [str(BIN / "mgpu-agent"), "--config", str(node.config), "run"]
        with open(node.folder / "agent.log", "ab") as log:
            node.agent = subprocess.Popen(
                [str(BIN / "python"), "-c", LAUNCH, ",".join(map(str, fds)), *words],
                env={**node.environment, **self.environment()},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def said(self, line):
        """How often a line has come."""
        return sum(message.count(line) for message in list(self.messages))

    def names(self):
        return [name for name, _ in self.stored]

    def _serve(self):
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * 16))
            if not data:
                return
            fds = array.array("i")
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            self._take(data.decode().splitlines(), list(fds))

    def _take(self, lines, fds):
        fields = dict(line.partition("=")[::2] for line in lines)
        if "FDSTORE" in fields:
            assert fields["FDPOLL"] == "0"  # poll(2) says that such a descriptor has hung up
            self.stored += [(fields["FDNAME"], fd) for fd in fds]
        elif "FDSTOREREMOVE" in fields:
            for name, fd in self.stored:
                if name == fields["FDNAME"]:
                    os.close(fd)
            self.stored = [entry for entry in self.stored if entry[0] != fields["FDNAME"]]
        else:
            self.messages.append(lines)
