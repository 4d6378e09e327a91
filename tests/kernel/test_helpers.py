"""Kernels that let BPF programs call less: what is lacking is found out, and done without."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_tracker import Client
from tests.lab import CONTEXT_MIB, MIB, v2_mount, wait_for

from mgpu.probes import helpers

LIMITED = Path(__file__).with_name("limited_agent.py")
GATE = ("MGPU_GATE_NO_ANCESTORS", "MGPU_GATE_NO_TASK_ID")
ALL = (*GATE, "MGPU_NO_ANCESTORS")


def test_a_kernel_of_6_1_or_later_lacks_nothing(root):
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (6, 1):
        pytest.skip("this kernel is older than 6.1")
    assert helpers.defines() == {}
    assert helpers.see_ancestors()


def test_a_helper_that_no_kernel_has_is_lacking(root):
    assert not helpers._allows(helpers._KPROBE, 100_000)


def test_without_rights_it_is_said():
    code = (
        "import os; os.setgid(65534); os.setuid(65534)\n"
        "from mgpu.errors import NotCapable\n"
        "from mgpu.probes import helpers\n"
        "try: helpers.defines()\n"
        "except NotCapable as error: print(error.code)\n"
    )
    if os.geteuid() != 0:
        pytest.skip("needs root")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "not-capable\n"


@pytest.fixture(params=[GATE, ALL], ids=["gate", "all"])
def node(module_node, request):
    command = [sys.executable, str(LIMITED), str(module_node.config), *request.param]
    module_node.start_agent(command)
    yield module_node
    left = not wait_for(lambda: not module_node.containers())
    module_node.stop_agent(signal.SIGKILL)
    assert not left, "a container was left bound"


def starts(node, cgroup):
    """Whether a client there finds a card."""
    client = Client(node, cgroup)
    if client.init == 0:
        client.end()
        return True
    client.process.wait()
    return False


def test_cgroups_inside_are_the_containers(node):
    """One made before the bind at once, one made after it from the next round on."""
    outer = v2_mount() / node.folder.name
    early, late = outer / "early", outer / "late"
    early.mkdir(parents=True)
    node.cli("bind", f"/{outer.name}", "--device", "0", "--core", "20", "--memory", "4096")
    late.mkdir()
    clients = []
    for cgroup in (outer, early, late):
        assert wait_for(lambda: starts(node, cgroup), 10)  # noqa: B023
        clients.append(Client(node, cgroup))
        assert clients[-1].ask("alloc", 100) == 0
    (row,) = node.containers()
    assert row["vmem_info"]["used_bytes"] == 3 * (CONTEXT_MIB + 100) * MIB
    assert clients[1].ask("alloc", 4000) == "killed"
    for client in clients:
        client.process.kill()
        client.process.wait()
    for cgroup in (early, late, outer):
        assert wait_for(lambda: not (cgroup / "cgroup.procs").read_text())  # noqa: B023
        cgroup.rmdir()
