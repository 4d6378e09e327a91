"""The keeper process and its client, with pipes for what is kept: no root needed."""

import os
import select
import signal
import socket
import subprocess
import sys

import pytest
from tests.lab import wait_for

from mgpu.fdstore import KeeperStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keeper.sock"


@pytest.fixture
def store(path):
    made = KeeperStore(path)
    yield made
    made.clear()


def pid_of(store):
    return store._living()


def kept_pipe(store, name):
    """A pipe whose writing end the keeper alone has; its reading end."""
    reader, writer = os.pipe()
    store.store(name, writer)
    os.close(writer)
    return reader


def is_open(reader):
    """Whether somebody still has the writing end."""
    return not select.select([reader], [], [], 0)[0]


def test_what_is_stored_stays_open_until_it_is_removed(store):
    first, second = kept_pipe(store, "a"), kept_pipe(store, "b")
    assert store.names() == {"a", "b"}
    store.remove("a")
    assert store.names() == {"b"}
    assert not is_open(first)
    assert is_open(second)
    os.close(first)
    os.close(second)


def test_a_name_stored_again_replaces_the_first(store):
    first, second = kept_pipe(store, "a"), kept_pipe(store, "a")
    assert store.names() == {"a"}
    assert not is_open(first)
    assert is_open(second)
    os.close(first)
    os.close(second)


def test_removing_what_is_not_there_is_nothing(store):
    store.remove("never")
    assert store.names() == set()


def test_more_names_than_fit_one_message(store):
    names = {f"{number:04d}-" + "x" * 200 for number in range(400)}  # 80 kB
    reader, writer = os.pipe()
    for name in names:
        store.store(name, writer)
    os.close(writer)
    assert store.names() == names
    os.close(reader)


def test_another_client_sees_the_same(store, path):
    reader = kept_pipe(store, "a")
    assert KeeperStore(path).names() == {"a"}
    os.close(reader)


def test_clear_ends_it_and_closes_everything(store, path):
    reader = kept_pipe(store, "a")
    assert store.is_running()
    store.clear()
    assert wait_for(lambda: not is_open(reader))
    assert not store.is_running()
    assert not path.exists()
    os.close(reader)


def test_clear_without_a_keeper_starts_none(path):
    KeeperStore(path).clear()
    assert not path.exists()
    assert not KeeperStore(path).is_running()


def test_two_at_once_leave_one(path):
    command = [sys.executable, "-m", "mgpu.keeper", str(path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    store = KeeperStore(path)
    assert wait_for(store.is_running)
    assert wait_for(lambda: [p.poll() for p in both].count(0) == 1)
    assert store.names() == set()
    store.clear()
    assert [p.wait(timeout=10) for p in both] == [0, 0]


def test_a_killed_one_is_replaced_and_its_socket_with_it(store):
    reader = kept_pipe(store, "a")
    first = pid_of(store)
    os.kill(first, signal.SIGKILL)
    assert wait_for(lambda: not is_open(reader))
    assert store.names() == set()
    assert pid_of(store) not in (0, first)
    os.close(reader)


def test_a_stopped_client_does_not_hold_it_up_for_ever(store, path):
    store.names()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))
        silent.send(b"not json")
        assert silent.recv(100) == b""
        assert store.names() == set()


def test_its_socket_is_its_users_alone(store, path):
    store.names()
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_knows_nothing_of_mgpu(store):
    """So that an upgrade need not restart it, and it stays small."""
    store.names()
    with open(f"/proc/{pid_of(store)}/status") as stream:
        lines = dict(line.split(":", 1) for line in stream)
    assert int(lines["VmRSS"].split()[0]) < 20_000, "kB"
    assert lines["Threads"].strip() == "1"
