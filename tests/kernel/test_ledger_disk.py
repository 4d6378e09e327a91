"""The ledger on a file system that is full, or read-only: real ones, mounted for the test."""

import os
import subprocess

import pytest

from mgpu.errors import StateUnusable
from mgpu.ledger import Ledger
from mgpu.model import MIB, Cgroup, Container
from mgpu.placement import Placement

BOOT = "boot"


def draft(number):
    return Container(f"{number:064x}", Cgroup(inode=number, unified=f"/c{number}"), ())


def on(device):
    return [Placement(f"GPU-{device}", device, 0, 30, 4096 * MIB)]


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 1 MiB of our own."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "mgpu-test", str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs (CAP_SYS_ADMIN): {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def remount(disk, option):
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


def fill(disk):
    with open(str(disk / "filler"), "wb", buffering=0) as stream, pytest.raises(OSError):
        while True:
            stream.write(b"x" * 4096)


def refused(use):
    with pytest.raises(StateUnusable) as caught:
        use()
    return str(caught.value)


def add_until_refused(ledger, first):
    """The numbers that were acknowledged, and the refusal that came in the end."""
    done = []
    for number in range(first, first + 1000):
        try:
            ledger.add(draft(number), on(number))
        except StateUnusable as error:
            return done, str(error)
        done.append(number)
    raise AssertionError("the disk never filled")


def held(ledger):
    return sorted(container.cgroup.inode for container in ledger.containers())


def test_a_disk_that_fills_up_loses_nothing_and_serves_again(disk):
    path = disk / "state.db"
    ledger = Ledger(path, BOOT)
    ledger.add(draft(1), on(1))
    fill(disk)
    done, said = add_until_refused(ledger, 2)
    assert said == f"ledger {path}: no space is left on its disk; free some and try again"
    assert held(ledger) == [1] + done
    assert "no space" in refused(lambda: ledger.set_fact("key", "x" * 8192))
    assert held(ledger) == [1] + done
    os.unlink(str(disk / "filler"))
    ledger.add(draft(5000), on(5000))
    assert held(ledger) == [1] + done + [5000]
    ledger.close()
    again = Ledger(path, BOOT)
    assert held(again) == [1] + done + [5000]
    again.close()


def test_a_transaction_that_fills_the_disk_leaves_nothing_of_itself(disk):
    ledger = Ledger(disk / "state.db", BOOT)
    ledger.add(draft(1), on(1))
    fill(disk)

    def many():
        with ledger.transaction():
            for number in range(2, 200):
                ledger.add(draft(number), on(number))
                ledger.set_fact(f"key{number}", "x" * 4000)

    assert "no space" in refused(many)
    assert held(ledger) == [1]
    assert ledger.facts() == {}
    ledger.close()


def test_a_full_disk_at_the_first_start(disk):
    fill(disk)
    path = disk / "state.db"
    assert "no space is left on its disk" in refused(lambda: Ledger(path, BOOT))
    os.unlink(str(disk / "filler"))
    ledger = Ledger(path, BOOT)
    ledger.add(draft(1), on(1))
    ledger.close()


def test_a_full_disk_at_a_later_start_after_a_kill(disk):
    """The -wal is there, the -shm must be made anew, and there is no room for it."""
    path = disk / "state.db"
    ledger = Ledger(path, BOOT)
    ledger.add(draft(1), on(1))
    saved = {name: (disk / name).read_bytes() for name in ("state.db", "state.db-wal")}
    ledger.close()
    for name, data in saved.items():
        (disk / name).write_bytes(data)
    fill(disk)
    assert "no space is left on its disk" in refused(lambda: Ledger(path, BOOT))
    os.unlink(str(disk / "filler"))
    again = Ledger(path, BOOT)
    assert held(again) == [1]
    again.close()


def test_read_only_at_start(disk):
    path = disk / "state.db"
    Ledger(path, BOOT).close()
    remount(disk, "ro")
    said = refused(lambda: Ledger(path, BOOT))
    assert said == (
        f"ledger {path}: it cannot be written; mount its file system read-write and try again"
    )
    assert "it cannot be written" in refused(lambda: Ledger(disk / "new" / "state.db", BOOT))
    remount(disk, "rw")
    Ledger(path, BOOT).close()


def test_an_immutable_file_is_told_at_start(tmp_path):
    path = tmp_path / "state.db"
    ledger = Ledger(path, BOOT)
    ledger.add(draft(1), on(1))
    ledger.close()
    done = subprocess.run(["chattr", "+i", str(path)], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        pytest.skip(f"an immutable file (chattr +i): {done.stderr.strip()}")
    try:
        assert "it cannot be written" in refused(lambda: Ledger(path, BOOT))
        assert "it cannot be written" in refused(lambda: ledger.add(draft(2), on(2)))
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)
    assert held(ledger) == [1]
    ledger.add(draft(2), on(2))
    ledger.close()
