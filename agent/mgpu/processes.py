"""Processes of this node as /proc shows them: whose child one is, and their end."""

import os
import signal
from pathlib import Path
from typing import Dict, Iterable, Iterator

from mgpu.errors import NotFound, NotPermitted
from mgpu.ports import Peer


class Processes:
    """Reads ``proc_root``; PIDs are those of the agent's own PID namespace unless said."""

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._proc_root = proc_root

    def child_of(self, peer: Peer, pid: int) -> int:
        """The PID of the child of ``peer`` that calls itself ``pid`` in its own PID namespace.

        Raises NotFound when ``peer`` has no such child, NotPermitted when it is another user's.
        """
        for candidate in self._candidates(pid):
            status = self._status(candidate)
            if status.get("PPid") != str(peer.pid):
                continue
            if status.get("NSpid", str(candidate)).split()[-1] != str(pid):
                continue
            if peer.uid not in (0, int(status["Uid"].split()[0])):
                remedy = "start the command as the user who asks"
                raise NotPermitted(f"PID {pid}", "it belongs to another user", remedy)
            return candidate
        remedy = "let the asking process fork it first"
        raise NotFound(f"PID {pid}", f"not a child of the asking process {peer.pid}", remedy)

    def kill(self, pids: Iterable[int]) -> None:
        """SIGKILL to each; those already gone are passed over."""
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _candidates(self, pid: int) -> Iterator[int]:
        """``pid`` itself first: only in another PID namespace must all be looked through."""
        yield pid
        for entry in os.listdir(self._proc_root):
            if entry.isdigit() and int(entry) != pid:
                yield int(entry)

    def _status(self, pid: int) -> Dict[str, str]:
        try:
            text = (self._proc_root / str(pid) / "status").read_text(errors="replace")
        except OSError:
            return {}
        pairs = (line.partition(":") for line in text.splitlines())
        return {name: value.strip() for name, _, value in pairs}
