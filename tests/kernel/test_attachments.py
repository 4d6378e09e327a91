"""Attachments by descriptors: with the keeper process, and with systemd's store."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.kernel.conftest import a_node
from tests.kernel.service_manager import ServiceManager
from tests.kernel.survival import no_probe_left, slots_id, used_mib
from tests.lab import BIN, CONTEXT_MIB, Tenant, wait_for

from mgpu.fdstore import KeeperStore
from mgpu.probes.tracking import KEEPER_SOCKET

KILLED = 128 + signal.SIGKILL
OPTIONS = ("--device", "0", "--core", "20", "--memory", "4096")


@pytest.fixture(scope="module")
def lab():
    with a_node(attachments="fds") as made:
        yield made


@pytest.fixture
def node(lab):
    lab.configure(attachments="fds", reconcile_interval_s=0.3)
    if lab.agent is None or lab.agent.poll() is not None:
        lab.start_agent()
    yield lab
    assert wait_for(lambda: not lab.containers()), "a container was left bound"


@pytest.fixture
def tenant(node):
    tenant = Tenant(node, "one", *OPTIONS)
    yield tenant
    if tenant.process.poll() is None:
        tenant.end()


def keeper_pid(node):
    """The keeper of this lab; 0: none."""
    path = str(node.folder / KEEPER_SOCKET)
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _words(entry)[-2:] == ["mgpu.keeper", path]
    ]
    return found[0] if len(found) == 1 else 0


def _words(entry):
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def kept(node):
    """What the keeper has, by probe: names begin with what they lead to."""
    store = KeeperStore(node.folder / KEEPER_SOCKET)
    names = store.names() if store.is_running() else set()
    assert len({name.partition("-")[0] for name in names}) <= 1
    return {name.partition("-")[2] for name in names}


def test_the_keeper_holds_limits_and_a_restart_attaches_nothing_twice(node, tenant):
    assert tenant.ask("alloc", 1000)["result"] == 0
    before, pid = kept(node), keeper_pid(node)
    assert pid
    node.stop_agent(signal.SIGKILL)
    assert tenant.ask("alloc", 500)["result"] == 0
    assert kept(node) == before
    node.start_agent()
    assert keeper_pid(node) == pid
    assert kept(node) == before
    assert used_mib(node) == CONTEXT_MIB + 1500
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 1600
    node.stop_agent(signal.SIGKILL)
    assert tenant.ask("alloc", 3000)["result"] == "killed"
    node.start_agent()
    assert tenant.process.wait(timeout=10) == KILLED


def test_the_keeper_outlives_an_orderly_stop_too(node, tenant):
    pid = keeper_pid(node)
    assert node.stop_agent(signal.SIGTERM) == 0
    assert keeper_pid(node) == pid
    assert tenant.ask("alloc", 4000)["result"] == "killed"
    node.start_agent()


def test_a_second_keeper_ends_at_once_and_the_first_goes_on(node):
    before, pid = kept(node), keeper_pid(node)
    command = [str(BIN / "python"), "-m", "mgpu.keeper", str(node.folder / KEEPER_SOCKET)]
    subprocess.run(command, check=True, timeout=30)
    assert keeper_pid(node) == pid
    assert kept(node) == before


def test_the_keeper_is_small(node):
    status = Path(f"/proc/{keeper_pid(node)}/status").read_text()
    (line,) = [x for x in status.splitlines() if x.startswith("VmRSS")]
    assert int(line.split()[1]) < 20_000, "kB"
    assert "Threads:\t1\n" in status


def test_teardown_ends_the_keeper_and_leaves_no_probe(node, tenant):
    assert tenant.ask("alloc", 100)["result"] == 0
    map_id = slots_id(node)
    tenant.end()
    node.stop_agent()
    assert node.teardown().returncode == 0
    assert wait_for(lambda: keeper_pid(node) == 0)
    assert no_probe_left(map_id)
    assert not list(node.folder.glob(KEEPER_SOCKET + "*"))
    node.start_agent()


def test_a_killed_keeper_is_replaced_at_the_next_round(node, tenant):
    assert tenant.ask("alloc", 100)["result"] == 0
    before, pid = kept(node), keeper_pid(node)
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: keeper_pid(node) not in (0, pid) and kept(node) == before), node.log()
    assert "attachments-lost" in node.log()
    assert tenant.ask("alloc", 200)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 300
    assert tenant.ask("alloc", 4000)["result"] == "killed"


def test_another_way_to_keep_attachments_takes_the_place_of_the_first(node, tenant):
    assert tenant.ask("alloc", 100)["result"] == 0
    there = len(kept(node))
    node.configure(attachments="link", reconcile_interval_s=0.3)
    node.stop_agent()
    node.start_agent()
    assert keeper_pid(node) == 0
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 200
    assert len(list((node.bpf_root / "links").iterdir())) == there
    node.configure(attachments="fds", reconcile_interval_s=0.3)
    node.stop_agent()
    node.start_agent()
    assert list((node.bpf_root / "links").iterdir()) == []
    assert len(kept(node)) == there
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 300


@pytest.fixture(scope="module")
def manager(lab):
    made = ServiceManager(lab.folder)
    yield made
    lab.stop_agent()
    made.close()


def test_systemd_keeps_the_descriptors(node, manager):
    node.stop_agent()
    manager.start(node)
    assert wait_for(lambda: manager.said("READY=1") == 1, 30)
    assert keeper_pid(node) == 0, "one way to keep them, not two"
    tenant = Tenant(node, "one", *OPTIONS)
    assert tenant.ask("alloc", 1000)["result"] == 0
    names = sorted(manager.names())
    assert len(set(names)) == len(names) > 50
    node.stop_agent(signal.SIGKILL)
    assert tenant.ask("alloc", 500)["result"] == 0
    manager.start(node)
    assert wait_for(lambda: manager.said("READY=1") == 2, 30)
    assert sorted(manager.names()) == names
    assert used_mib(node) == CONTEXT_MIB + 1500
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 1600
    node.stop_agent(signal.SIGKILL)
    assert tenant.ask("alloc", 3000)["result"] == "killed"
    manager.start(node)
    assert wait_for(lambda: manager.said("READY=1") == 3, 30)
    assert tenant.process.wait(timeout=10) == KILLED


def test_what_systemd_is_told(node, manager):
    node.stop_agent()
    assert wait_for(lambda: manager.messages[-1] == ["STOPPING=1"])
    manager.messages.clear()
    manager.start(node)
    assert wait_for(lambda: manager.said("READY=1") == 1, 30)
    assert wait_for(lambda: manager.said("WATCHDOG=1") > 3)
    node.agent.send_signal(signal.SIGHUP)
    assert wait_for(lambda: manager.said("READY=1") == 2)
    told = [lines[0] for lines in manager.messages if lines[0] != "WATCHDOG=1"]
    assert told == ["READY=1", "RELOADING=1", "READY=1"]
    (reloading,) = [lines for lines in manager.messages if lines[0] == "RELOADING=1"]
    asked_us = int(reloading[1].partition("MONOTONIC_USEC=")[2])
    assert asked_us < time.monotonic_ns() // 1000
    assert node.stop_agent(signal.SIGTERM) == 0
    assert wait_for(lambda: manager.said("STOPPING=1") == 1)
    assert manager.messages[-1] == ["STOPPING=1"]
    manager.start(node)
    assert wait_for(lambda: node.answers(), 30)
