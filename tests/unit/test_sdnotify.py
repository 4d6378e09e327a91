"""What the service manager is told, and when: over a real datagram socket."""

import array
import os
import socket
import time

import pytest

from mgpu.daemon import Daemon
from mgpu.sdnotify import ServiceManager


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(5)
        yield made


def manager(listener, **environment):
    return ServiceManager({"NOTIFY_SOCKET": listener.getsockname(), **environment})


def received(listener):
    listener.setblocking(False)
    found = []
    try:
        while True:
            found.append(listener.recv(4096).decode())
    except BlockingIOError:
        return found


def test_the_messages_are_those_of_sd_notify(listener):
    made = manager(listener)
    made.ready()
    made.stopping()
    made.alive()
    made.status("two cards")
    assert received(listener) == [
        "READY=1\nSTATUS=limits are in force",
        "STOPPING=1",
        "WATCHDOG=1",
        "STATUS=two cards",
    ]


def test_a_reload_carries_the_time_that_notify_reload_asks_for(listener):
    before_us = time.monotonic_ns() // 1000
    manager(listener).reloading()
    first, second = received(listener)[0].split("\n")
    assert first == "RELOADING=1"
    assert before_us <= int(second.partition("MONOTONIC_USEC=")[2]) <= time.monotonic_ns() // 1000


def test_a_descriptor_travels_with_its_name_and_is_not_polled(listener):
    reader, writer = os.pipe()
    manager(listener).store_fd("t-one", writer)
    data, ancillary, _, _ = listener.recvmsg(4096, socket.CMSG_SPACE(4))
    assert data == b"FDSTORE=1\nFDPOLL=0\nFDNAME=t-one"
    ((_, _, payload),) = ancillary
    (copy,) = array.array("i", payload)
    os.write(copy, b"x")
    assert os.read(reader, 1) == b"x"
    for fd in (reader, writer, copy):
        os.close(fd)


def test_forgetting_one(listener):
    manager(listener).remove_fd("t-one")
    assert received(listener) == ["FDSTOREREMOVE=1\nFDNAME=t-one"]


def test_an_abstract_socket():
    name = f"mgpu-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind("\0" + name)
        ServiceManager({"NOTIFY_SOCKET": "@" + name}).alive()
        assert received(made) == ["WATCHDOG=1"]


def test_without_a_manager_nothing_happens():
    made = ServiceManager({})
    made.ready()
    made.store_fd("x", 0)
    assert not made.stores_fds
    assert made.watchdog_s is None


def test_a_manager_that_went_away_does_no_harm(tmp_path):
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).alive()


@pytest.mark.parametrize(
    ("environment", "stores"),
    [
        ({}, False),  # before systemd 254; it may be too old for FDPOLL=0
        ({"FDSTORE": "0"}, False),
        ({"FDSTORE": "512"}, True),
    ],
)
def test_whether_descriptors_may_be_left(listener, environment, stores):
    assert manager(listener, **environment).stores_fds is stores


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_of_this_process(listener, environment, expected):
    assert manager(listener, **environment).watchdog_s == expected


class Rounds:
    """An agent whose rounds end as told; after the last one the daemon is stopped."""

    def __init__(self, daemon, outcomes):
        self._daemon = daemon
        self._outcomes = list(outcomes)

    def round(self, full):
        wanted, outcome = self._outcomes.pop(0)
        assert full is wanted
        self._daemon._wake.set()
        if not self._outcomes:
            self._daemon._stopping = True
        return outcome


def fed(listener, tmp_path, monkeypatch, outcomes):
    """How often the watchdog was fed over rounds of (whether full, whether it went through)."""
    config = tmp_path / "agent.conf"
    config.write_text("[agent]\nreconcile_interval_s = 60\n")
    monkeypatch.setenv("NOTIFY_SOCKET", listener.getsockname())
    daemon = Daemon(config)
    daemon._loop(Rounds(daemon, outcomes))
    return received(listener).count("WATCHDOG=1")


def test_rounds_that_go_through_feed_the_watchdog(listener, tmp_path, monkeypatch):
    outcomes = [(True, True), (False, True), (False, True)]
    assert fed(listener, tmp_path, monkeypatch, outcomes) == 3


def test_after_a_round_that_failed_small_ones_do_not_feed_it(listener, tmp_path, monkeypatch):
    outcomes = [(True, False), (False, True), (False, True)]
    assert fed(listener, tmp_path, monkeypatch, outcomes) == 0


def test_a_small_round_that_failed_ends_the_feeding(listener, tmp_path, monkeypatch):
    outcomes = [(True, True), (False, False), (False, True)]
    assert fed(listener, tmp_path, monkeypatch, outcomes) == 1
