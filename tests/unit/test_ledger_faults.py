"""A ledger file that cannot serve: one clear line, nothing changed, and on again afterwards."""

import os
import random
import resource
import sqlite3
from dataclasses import replace

import pytest
from test_ledger import BOOT, draft, on, raw

from mgpu import statefile
from mgpu.errors import BadInput, StateUnusable
from mgpu.ledger import Ledger
from mgpu.model import Container

PAGE_BYTES = 4096


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.db"


@pytest.fixture
def filled(path):
    """A closed ledger of ten containers, all in state.db: closing empties the -wal."""
    ledger = Ledger(path, BOOT)
    for number in range(10):
        ledger.add(draft(number), [on(number)])
    ledger.close()
    return path


def refusal(path):
    with pytest.raises(StateUnusable) as caught:
        Ledger(path, BOOT).containers()
    line = str(caught.value)
    assert line.startswith(f"ledger {path}: ")
    assert "\n" not in line and "; " in line
    return line


def test_a_file_of_something_else(path):
    path.write_text("[agent]\nsocket = /run/mgpu/agent.sock\n" * 100)
    assert "it is damaged (file is not a database)" in refusal(path)


def test_the_database_of_another_program(path):
    connection = raw(path)
    connection.execute("CREATE TABLE song (title)")
    connection.close()
    before = path.read_bytes()
    assert "it is an SQLite file of another program" in refusal(path)
    assert path.read_bytes() == before


def test_a_folder_in_its_place(path):
    path.mkdir()
    assert "unable to open database file" in refusal(path)


def test_a_file_where_its_folder_should_be(tmp_path):
    (tmp_path / "state").touch()
    refusal(tmp_path / "state" / "state.db")


def test_an_empty_file_is_a_new_ledger(path):
    path.touch()
    ledger = Ledger(path, BOOT)
    assert ledger.containers() == []
    ledger.close()


def test_a_start_that_was_cut_short_leaves_a_new_ledger(path):
    """As if killed after the file was made and before its tables were committed."""
    connection = raw(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    ledger = Ledger(path, BOOT)
    ledger.add(draft(1), [on(0)])
    ledger.close()


def test_every_page_overwritten_in_turn(filled):
    sound = filled.read_bytes()
    everyone = _contents(filled)
    refused = 0
    for start in range(0, len(sound), PAGE_BYTES):
        for junk in (b"\0" * PAGE_BYTES, _noise(start)):
            filled.write_bytes(sound[:start] + junk + sound[start + PAGE_BYTES :])
            try:
                assert _contents(filled) == everyone
            except StateUnusable:
                refused += 1
            _remove_side_files(filled)
    assert refused >= len(sound) // PAGE_BYTES
    filled.write_bytes(sound)
    assert _contents(filled) == everyone


def test_bits_flipped_anywhere_never_end_in_a_traceback(filled):
    sound = filled.read_bytes()
    chance = random.Random(2)
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(chance.choice((1, 1, 4))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        filled.write_bytes(bytes(damaged))
        try:
            for container in _contents(filled):
                assert isinstance(container, Container)
        except StateUnusable as error:
            assert "\n" not in str(error)
        _remove_side_files(filled)


@pytest.mark.parametrize("kept", [1, 99, 100, 4095, 4096, 8192])
def test_cut_off(filled, kept):
    filled.write_bytes(filled.read_bytes()[:kept])
    refusal(filled)


def test_a_cell_that_no_agent_wrote(filled):
    for damage in (
        "UPDATE container SET enforcer = 'kilm'",
        "UPDATE container SET name = CAST(x'ff' AS TEXT)",
        "PRAGMA ignore_check_constraints = 1; UPDATE policy SET policy = 9",
    ):
        sound = filled.read_bytes()
        ledger = Ledger(filled, BOOT)
        ledger.set_policy("GPU-0", 0)
        connection = raw(filled)
        connection.executescript(damage)
        connection.close()
        with pytest.raises(StateUnusable) as caught:
            ledger.containers()
            ledger.policies()
        assert "it is damaged" in str(caught.value)
        ledger.close()
        filled.write_bytes(sound)


def test_a_write_that_the_kernel_refuses_changes_nothing(path):
    """EFBIG stands for any I/O error: SQLite sees a failed write, and the disk is not full."""
    ledger = Ledger(path, BOOT)
    kept = ledger.add(draft(1), [on(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        for change in (
            lambda: ledger.add(draft(2), [on(1)]),
            lambda: ledger.remove(kept.container_id),
            lambda: ledger.update(replace(kept, online=False)),
            lambda: ledger.set_fact("a", "b"),
        ):
            with pytest.raises(StateUnusable) as caught:
                change()
            assert "disk I/O error" in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ledger.containers() == [kept]
    assert ledger.facts() == {}
    ledger.add(draft(2), [on(1)])
    ledger.close()
    again = Ledger(path, BOOT)
    assert len(again.containers()) == 2
    again.close()


def test_no_write_slips_past_a_transaction_that_sqlite_ended_itself(path):
    """On a full disk SQLite may roll back in the middle; what follows must not be autocommitted."""
    ledger = Ledger(path, BOOT)
    with pytest.raises(StateUnusable), ledger.transaction():
        ledger.set_fact("a", "b")
        ledger._file._connection.execute("ROLLBACK")
        with pytest.raises(StateUnusable):
            ledger.set_fact("c", "d")
    assert ledger.facts() == {}
    ledger.set_fact("e", "f")
    assert ledger.facts() == {"e": "f"}
    ledger.close()


def test_kept_locked_by_another_process(path, monkeypatch):
    monkeypatch.setattr(statefile, "BUSY_TIMEOUT_S", 0.05)
    ledger = Ledger(path, BOOT)
    other = raw(path)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateUnusable) as caught:
        ledger.add(draft(1), [on(0)])
    assert "another process kept it locked" in str(caught.value)
    assert f"fuser {path}" in str(caught.value)
    assert ledger.containers() == []
    refusal(path)  # a second agent's start
    other.execute("ROLLBACK")
    ledger.add(draft(1), [on(0)])
    ledger.close()
    other.close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_taken_away_while_open(path, tmp_path, how):
    ledger = Ledger(path, BOOT)
    kept = ledger.add(draft(1), [on(0)])
    path.rename(tmp_path / "aside")
    if how == "replaced":
        path.touch()
    for use in (ledger.containers, lambda: ledger.add(draft(2), [on(1)])):
        with pytest.raises(StateUnusable) as caught:
            use()
        assert "replaced or removed while the agent had it open" in str(caught.value)
    (tmp_path / "aside").rename(path)
    assert ledger.containers() == [kept]
    ledger.add(draft(2), [on(1)])
    ledger.close()


def test_a_file_system_without_shared_memory(path, monkeypatch):
    """None such is at hand here; SQLite then answers another journal mode than the one asked."""
    real = statefile._pragma
    monkeypatch.setattr(
        statefile, "_pragma", lambda c, n: "delete" if n.startswith("journal_mode") else real(c, n)
    )
    assert "lacks what SQLite's write-ahead log needs" in refusal(path)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(draft(1), name="\udcff"),
        replace(draft(1), container_id="\ud800"),
        replace(draft(1), cgroup=replace(draft(1).cgroup, unified="/\udcff")),
        replace(draft(1), cgroup=replace(draft(1).cgroup, inode=2**64)),
    ],
    ids=["name", "id", "path", "inode"],
)
def test_what_sqlite_cannot_hold(path, wrong):
    ledger = Ledger(path, BOOT)
    with pytest.raises(BadInput) as caught:
        ledger.add(wrong, [on(0)])
    assert str(caught.value).isprintable()
    assert ledger.containers() == []
    ledger.add(draft(2), [on(0)])
    ledger.close()


def test_odd_text_is_only_text(path):
    ledger = Ledger(path, BOOT)
    odd = replace(draft(1), name="'; DROP TABLE container; --\n\0é🙂", pod_uid="%")
    assert ledger.add(odd, [on(0)]).name == odd.name
    ledger.close()


def test_a_connection_is_closed_when_its_file_is_refused(path):
    path.write_text("no database " * 1000)
    for _ in range(3):
        refusal(path)
    opened = os.listdir("/proc/self/fd")
    for _ in range(50):
        refusal(path)
    assert len(os.listdir("/proc/self/fd")) <= len(opened)


def _noise(seed):
    chance = random.Random(seed)
    return bytes(chance.getrandbits(8) for _ in range(PAGE_BYTES))


def _contents(path):
    ledger = Ledger(path, BOOT)
    try:
        return ledger.containers()
    finally:
        ledger.close()


def _remove_side_files(path):
    for suffix in ("-wal", "-shm"):
        if os.path.exists(f"{path}{suffix}"):
            os.unlink(f"{path}{suffix}")


def test_sqlite_is_new_enough():
    assert sqlite3.sqlite_version_info >= (3, 31)  # Ubuntu 20.04's
