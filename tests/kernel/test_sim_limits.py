"""The simulated driver's own limits by cgroup, set through nvidia-ml-py as on drivers from R615."""

import os
import subprocess
import sys

import pytest
from tests.lab import v2_mount, wait_for
from tests.simlab import CLIENT, CONTEXT_BYTES, MIB, Process, SimLab

OUT_OF_MEMORY = {"result": 2}
SET = """
import sys
import pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(0)
folder, mib = sys.argv[1].encode(), int(sys.argv[2])
if mib:
    hard = n.NVML_DEVICE_MEMORY_LIMIT_MAX if mib < 0 else mib << 20
    n.nvmlDeviceSetMemoryLimits_v1(card, n.c_nvmlSetMemoryLimits_v1_t(folder, 0, hard))
else:
    limits = n.c_nvmlGetMemoryLimits_v1_t(folder)
    n.nvmlDeviceGetMemoryLimits_v1(card, limits)
    print(limits.hardLimit, limits.currentUsed)
"""


@pytest.fixture
def lab(tmp_path):
    return SimLab(tmp_path, "driver_version = 615.10.01\n")


@pytest.fixture
def cgroup(unified):
    path = v2_mount() / f"mgpu-test-{os.getpid()}-limits"
    (path / "inner").mkdir(parents=True)
    yield path
    assert wait_for(lambda: not (path / "inner/cgroup.procs").read_text())
    assert wait_for(lambda: not (path / "cgroup.procs").read_text())
    (path / "inner").rmdir()
    path.rmdir()


def inside(lab, cgroup):
    """A client that begins in the cgroup."""
    script = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
    process = Process(["sh", "-c", script, "sh", sys.executable, str(CLIENT)], lab.env)
    assert process.read() == {"init": 0}
    return process


def limit(lab, cgroup, mib):
    return lab.python(SET, cgroup, mib).split()


def test_a_cgroup_and_those_inside_share_a_limit(lab, cgroup):
    limit(lab, cgroup, 2048)
    with inside(lab, cgroup) as one, inside(lab, cgroup / "inner") as other, lab.client() as free:
        assert one.ask("alloc", 1000) == {"result": 0}
        assert one.ask("info") == {
            "result": 0,
            "total_bytes": 2048 * MIB,
            "free_bytes": 1048 * MIB - CONTEXT_BYTES,
        }
        assert other.ask("alloc", 1000) == OUT_OF_MEMORY
        assert other.ask("alloc", 500) == {"result": 0}
        assert free.ask("alloc", 10000) == {"result": 0}
        used = 1500 * MIB + 2 * CONTEXT_BYTES
        assert limit(lab, cgroup, 0) == [str(2048 * MIB), str(used)]
        one.kill()
        assert other.ask("alloc", 1000) == {"result": 0}
        limit(lab, cgroup, -1)
        assert other.ask("alloc", 10000) == {"result": 0}


def test_a_removed_cgroup_has_no_limit(lab, unified):
    path = v2_mount() / f"mgpu-test-{os.getpid()}-gone"
    for _ in range(2):
        path.mkdir()
        with pytest.raises(subprocess.CalledProcessError):
            limit(lab, path, 0)
        limit(lab, path, 1024)
        assert limit(lab, path, 0) == [str(1024 * MIB), "0"]
        path.rmdir()
    with pytest.raises(subprocess.CalledProcessError):
        limit(lab, path, 1024)


def test_an_older_driver_has_none(tmp_path, cgroup):
    with pytest.raises(subprocess.CalledProcessError):
        limit(SimLab(tmp_path), cgroup, 1024)
