"""What this kernel and these rights allow; each skip names what is missing."""

import fcntl
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.lab import SIM, Node, leftovers

from mgpu.cgroups import open_cgroups
from mgpu.errors import MgpuError
from mgpu.probes import events


def has_root():
    return os.geteuid() == 0


def has_cgroup2():
    try:
        return open_cgroups().unified is not None
    except MgpuError:
        return False


def has_devices_v1():
    try:
        return open_cgroups().devices is not None
    except MgpuError:
        return False


def can_make_nodes(folder):
    """CAP_MKNOD, on a file system whose nodes can be opened (not mounted nodev)."""
    path = Path(folder) / "mknod-probe"
    try:
        os.mknod(str(path), stat.S_IFCHR | 0o600, os.makedev(1, 3))
        with open(str(path), "rb"):
            return True
    except OSError:
        return False
    finally:
        if path.exists():
            path.unlink()


@pytest.fixture(scope="session", autouse=True)
def machine():
    """Its cgroups, /dev and gates are one: two runs beside each other would undo each other's."""
    with open(Path(tempfile.gettempdir()) / "mgpu-kernel-tests.lock", "a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


@pytest.fixture
def root():
    if not has_root():
        pytest.skip("needs root")


@pytest.fixture
def cgroups(root):
    return open_cgroups()


@pytest.fixture
def unified(cgroups):
    if not has_cgroup2():
        pytest.skip("cgroup2 is not mounted at or below /sys/fs/cgroup")
    return cgroups


@pytest.fixture
def devices_v1(cgroups):
    if not has_devices_v1():
        pytest.skip("the v1 devices controller is not mounted below /sys/fs/cgroup")
    return cgroups


@pytest.fixture
def dev(root, tmp_path):
    """A folder for device nodes."""
    if not can_make_nodes(tmp_path):
        pytest.skip("needs CAP_MKNOD and a temporary folder without nodev")
    return tmp_path


def missing_for_agent():
    """What a whole agent with simulated cards lacks here; empty: nothing."""
    if not has_root():
        return "needs root"
    if not has_cgroup2():
        return "cgroup2 is not mounted at or below /sys/fs/cgroup"
    if not events.supported():
        return "this kernel has no uprobes (CONFIG_UPROBE_EVENTS)"
    if not (SIM / "libnvidia-ml.so.1").exists():
        return "the simulated GPU is not built (make sim)"
    return ""


def missing_for_programs():
    """What loading and attaching the programs lacks here; empty: nothing."""
    if not has_root():
        return "needs root"
    if not has_cgroup2():
        return "cgroup2 is not mounted at or below /sys/fs/cgroup"
    if not events.supported():
        return "this kernel has no uprobes (CONFIG_UPROBE_EVENTS)"
    return ""


@contextmanager
def a_node(**keys):
    """An agent's configuration and folders; the test starts the agent itself."""
    reason = missing_for_agent()
    if reason:
        pytest.skip(reason)
    lab = Node(reconcile_interval_s=0.3, **keys)
    try:
        yield lab
    finally:
        lab.close()
    assert leftovers(lab.bpf_root) == []


@pytest.fixture
def node():
    with a_node() as lab:
        yield lab


@pytest.fixture(scope="module")
def module_node():
    """One for all tests of a module, which is quicker: its programs are compiled once."""
    with a_node() as lab:
        yield lab
