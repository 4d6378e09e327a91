"""SIGKILL of the agent at every step between a request and its answer; promise 4 afterwards.

What was answered is there after the restart; what was not is whole or has left nothing behind; and
the node agrees with the ledger either way.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.lab import v2_mount, wait_for

from mgpu import bpf
from mgpu.model import MIB

CRASHING = Path(__file__).with_name("crashing_agent.py")
STEPS = [
    ("mgpu.cgroups:Cgroups.create", "after"),
    ("mgpu.ledger:Ledger.add", "before"),
    ("mgpu.ledger:Ledger.add", "after"),
    ("mgpu.reconcile:Reconciler.apply", "before"),
    ("mgpu.nodes:Nodes.ensure", "before"),
    ("mgpu.nodes:Nodes.ensure", "after"),
    ("mgpu.cgroups.gate:Gate.close", "before"),
    ("mgpu.cgroups.gate:Gate.close", "after"),
    ("mgpu.probes.tables:Tables.bind", "before"),
    ("mgpu.probes.tables:Tables.bind", "after"),
    ("mgpu.cgroups:Cgroups.add", "before"),
    ("mgpu.cgroups:Cgroups.add", "after"),
]
RELEASE_STEPS = [
    ("mgpu.ledger:Ledger.remove", "before"),
    ("mgpu.ledger:Ledger.remove", "after"),
    ("mgpu.probes.tables:Tables.unbind", "before"),
    ("mgpu.probes.tables:Tables.unbind", "after"),
    ("mgpu.cgroups.gate:Gate.open", "after"),
    ("mgpu.probes.tables:Tables.remove_share", "before"),
    ("mgpu.nodes:Nodes.ensure", "after"),
]


@pytest.fixture
def node(module_node):
    yield module_node
    if module_node.agent.poll() is None:
        module_node.stop_agent(9)


def start_crashing(node, step):
    armed = node.folder / "armed"
    command = [sys.executable, str(CRASHING), *step, str(armed), str(node.config)]
    node.start_agent(command)
    return armed


def died(node):
    assert node.agent.wait(timeout=20) == -9


def instances_in_dev():
    return sorted(p.name for p in Path("/dev").glob("mgpu*inst*"))


def our_cgroups():
    return sorted(p.name for p in (v2_mount() / "mgpu").glob("run-*"))


@contextmanager
def opened(folder):
    fd = os.open(str(folder), os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def bind_cgroup(name):
    path = v2_mount() / name
    path.mkdir()
    return path


@pytest.mark.parametrize("step", STEPS, ids=lambda s: ":".join(s).replace("mgpu.", ""))
def test_run(node, step):
    armed = start_crashing(node, step)
    armed.touch()
    marker = node.folder / "ran"
    done = node.cli(
        "run", "--core", "10", "--memory", "512", "--", "touch", str(marker), check=False
    )
    died(node)
    armed.unlink()
    assert done.returncode == 125
    assert not marker.exists(), "the command ran without having been let"
    node.start_agent()
    assert wait_for(lambda: not node.containers() and not our_cgroups(), 40)
    assert instances_in_dev() == []


@pytest.mark.parametrize("step", STEPS[1:10], ids=lambda s: ":".join(s).replace("mgpu.", ""))
def test_bind(node, step):
    cgroup = bind_cgroup(node.folder.name)
    try:
        armed = start_crashing(node, step)
        armed.touch()
        target = "/" + cgroup.name
        done = node.cli("bind", target, "--core", "10", "--memory", "512", check=False)
        died(node)
        armed.unlink()
        assert done.returncode != 0
        node.start_agent()
        rows = node.containers()
        assert len(rows) in (0, 1)
        assert len(instances_in_dev()) == len(rows)
        if rows:
            assert rows[0]["vmem_info"]["limit_bytes"] == 512 * MIB
        else:
            node.cli("bind", target, "--core", "10", "--memory", "512")
        again = node.cli("bind", target, "--core", "10", "--memory", "512", check=False)
        assert again.returncode == 5  # bound it is, once
    finally:
        cgroup.rmdir()


@pytest.mark.parametrize("step", RELEASE_STEPS, ids=lambda s: ":".join(s).replace("mgpu.", ""))
def test_release(node, step):
    cgroup = bind_cgroup(node.folder.name)
    try:
        armed = start_crashing(node, step)
        target = "/" + cgroup.name
        bound = node.cli("bind", target, "--core", "10", "--memory", "512", "-o", "json")
        container = json.loads(bound.stdout)["id"]
        armed.touch()
        done = node.cli("release", container, check=False)
        died(node)
        armed.unlink()
        assert done.returncode != 0
        node.start_agent()
        if node.containers():
            node.cli("release", container)
        assert node.containers() == []
        assert instances_in_dev() == []
        with opened(cgroup) as fd:
            assert bpf.prog_query(fd, bpf.ATTACH_CGROUP_DEVICE) == []
    finally:
        cgroup.rmdir()


@pytest.mark.parametrize("step", RELEASE_STEPS, ids=lambda s: ":".join(s).replace("mgpu.", ""))
def test_release_of_a_v1_cgroup_takes_the_cards_away(node, devices_v1, step):
    """Such a one denies all but what its runtime, and the agent, allowed it."""
    tree, path = devices_v1.devices, f"/{node.folder.name}"
    tree.make(path)
    try:
        for verb, rule in (("deny", "a *:* rwm"), ("allow", "c *:* m"), ("allow", "c 1:3 rwm")):
            (tree.directory(path) / f"devices.{verb}").write_text(rule)
        before = tree.rules(path)
        armed = start_crashing(node, step)
        bound = node.cli("bind", path, "--core", "10", "--memory", "512", "-o", "json")
        assert len(tree.rules(path)) == len(before) + 3
        armed.touch()
        node.cli("release", json.loads(bound.stdout)["id"], check=False)
        died(node)
        armed.unlink()
        node.start_agent()
        for row in node.containers():
            node.cli("release", row["container_id"])
        assert tree.rules(path) == before
    finally:
        tree.remove(path)


def test_set(node):
    cgroup = bind_cgroup(node.folder.name)
    try:
        armed = start_crashing(node, ("mgpu.ledger:Ledger.update", "after"))
        target = "/" + cgroup.name
        bound = node.cli("bind", target, "--core", "10", "--memory", "512", "-o", "json")
        container = json.loads(bound.stdout)["id"]
        armed.touch()
        assert node.cli("set", container, "--memory", "1024", check=False).returncode != 0
        died(node)
        armed.unlink()
        node.start_agent()
        limits = {row["vmem_info"]["limit_bytes"] for row in node.containers()}
        assert limits in ({512 * MIB}, {1024 * MIB})
    finally:
        cgroup.rmdir()
