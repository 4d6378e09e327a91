"""Whose child a process is: on the real /proc, and on one of another PID namespace."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from mgpu.errors import NotFound, NotPermitted
from mgpu.ports import Peer
from mgpu.processes import Processes


def test_a_child_of_the_peer() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        me = Peer(os.getpid(), os.getuid(), os.getgid())
        assert Processes().child_of(me, child.pid) == child.pid
        Processes().kill([child.pid])
        assert child.wait(10) == -signal.SIGKILL
        Processes().kill([child.pid])


@pytest.mark.parametrize("pid", [1, os.getpid(), 2**22 + 1])
def test_no_child_of_the_peer(pid: int) -> None:
    with pytest.raises(NotFound):
        Processes().child_of(Peer(os.getpid(), 0, 0), pid)


def _process(proc: Path, pid: int, parent: int, uid: int, ns_pids: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "status").write_text(
        f"Name:\tsleep\nPPid:\t{parent}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{ns_pids}\n"
    )


def test_peer_in_a_pid_namespace_of_its_own(tmp_path: Path) -> None:
    _process(tmp_path, 7, 1, 1000, "7")
    _process(tmp_path, 500, 1, 1000, "500\t5")
    _process(tmp_path, 507, 500, 1000, "507\t7")
    (tmp_path / "self").mkdir()
    assert Processes(tmp_path).child_of(Peer(500, 1000, 1000), 7) == 507


def test_a_child_that_changed_its_user(tmp_path: Path) -> None:
    _process(tmp_path, 507, 500, 0, "507")
    with pytest.raises(NotPermitted):
        Processes(tmp_path).child_of(Peer(500, 1000, 1000), 507)
    assert Processes(tmp_path).child_of(Peer(500, 0, 0), 507) == 507
