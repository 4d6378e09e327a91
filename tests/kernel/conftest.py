"""What this kernel and these rights allow; each skip names what is missing."""

import os
import stat
from pathlib import Path

import pytest

from mgpu.cgroups import open_cgroups
from mgpu.errors import MgpuError


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
