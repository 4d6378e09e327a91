"""Process events of this kernel."""

import os
import queue
import subprocess
import sys
import threading

import pytest

from mgpu import procevents
from mgpu.errors import NotCapable
from mgpu.procevents import EXEC, EXIT, LOST, ProcEvent, ProcEvents

WAIT_S = 20


@pytest.fixture
def told():
    events = queue.Queue()
    source = ProcEvents(events.put)
    try:
        source.start()
    except NotCapable as error:
        pytest.skip(f"process connector: {error}")
    yield events
    source.stop()


def _events_until(events, last):
    found = []
    while True:
        found.append(events.get(timeout=WAIT_S))
        if found[-1] == last:
            return found


def test_the_start_asks_for_a_look(told):
    assert told.get(timeout=WAIT_S) == ProcEvent(LOST, 0)


def test_exec_and_exit_of_a_process(told):
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    found = _events_until(told, ProcEvent(EXIT, process.pid))
    assert ProcEvent(EXEC, process.pid) in found


def test_a_killed_process_is_told(told):
    process = subprocess.Popen(["/bin/sleep", "100"])
    process.kill()
    process.wait()
    _events_until(told, ProcEvent(EXIT, process.pid))


def test_the_exit_of_a_thread_is_not_that_of_its_process(told):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    found = _events_until(told, ProcEvent(EXIT, process.pid))
    assert ProcEvent(EXIT, os.getpid()) not in found


def test_a_socket_that_breaks_is_made_anew(monkeypatch):
    monkeypatch.setattr(procevents, "_AGAIN_S", 0.01)
    events = queue.Queue()
    source = ProcEvents(events.put)
    try:
        source.start()
    except NotCapable as error:
        pytest.skip(f"process connector: {error}")
    assert events.get(timeout=WAIT_S) == ProcEvent(LOST, 0)
    # Something that is no socket takes its descriptor: reading it fails.
    with open("/dev/null") as null:
        os.dup2(null.fileno(), source._socket.fileno())
    subprocess.run(["/bin/true"], check=True)  # ends the wait that still has the old file
    assert events.get(timeout=WAIT_S) == ProcEvent(LOST, 0)
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    _events_until(events, ProcEvent(EXIT, process.pid))
    source.stop()


def test_it_stops_and_starts_again():
    events = queue.Queue()
    source = ProcEvents(events.put)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        try:
            source.start()
        except NotCapable as error:
            pytest.skip(f"process connector: {error}")
        assert source.alive()
        source.stop()
        assert not source.alive()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_what_is_needed_of_pyroute2_is_imported():
    code = "import sys, mgpu.procevents as p; p._cn_proc(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert "pyroute2.netlink.connector.cn_proc" in loaded
    assert "pyroute2.ndb" not in loaded and "pyroute2.iproute" not in loaded


def test_without_the_hosts_network_it_says_so():
    code = (
        "from mgpu.procevents import ProcEvents\n"
        "from mgpu.errors import NotCapable\n"
        "try: ProcEvents(print).start()\n"
        "except NotCapable as e: print(e.code)\n"
    )
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        pytest.skip("network namespaces cannot be made here")
    assert done.stdout == "not-capable\n"
