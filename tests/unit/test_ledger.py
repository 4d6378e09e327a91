"""What the ledger keeps, refuses and survives."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu import placement, statefile
from mgpu.errors import Conflict, NoRoom, NotFound, StateUnusable
from mgpu.ledger import SCHEMA, Ledger, read_boot_id
from mgpu.model import MIB, Cgroup, Container, Device, Enforcer, Instance, Policy, Request
from mgpu.placement import Placement, Strategy

BOOT = "5d0c5d4c-0000-4000-8000-000000000001"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "state.db"


@pytest.fixture
def ledger(path):
    opened = Ledger(path, BOOT)
    yield opened
    opened.close()


def draft(number, **more):
    return Container(
        container_id=f"{number:064x}",
        cgroup=Cgroup(inode=1000 + number, unified=f"/c{number}", freezer=f"/f{number}"),
        instances=(),
        created_at_s=float(number),
        **more,
    )


def on(device, instance_id=0, weight=30, limit_mib=4096, whole=False):
    return Placement(f"GPU-{device}", device, instance_id, weight, limit_mib * MIB, whole)


def raw(path):
    return sqlite3.connect(str(path), isolation_level=None)


def test_a_container_comes_back_as_it_went_in(ledger):
    added = ledger.add(
        draft(1, online=False, enforcer=Enforcer.OBSERVE, pod_uid="p", name="n", origin="run"),
        [on(1, 3, 40, 8192), on(0, 2, 40, 8192)],
    )
    assert added == Container(
        container_id="0" * 63 + "1",
        cgroup=Cgroup(inode=1001, unified="/c1", freezer="/f1"),
        instances=(
            Instance(2, "GPU-0", 0, 2, 40, 8192 * MIB),
            Instance(1, "GPU-1", 1, 3, 40, 8192 * MIB),
        ),
        online=False,
        enforcer=Enforcer.OBSERVE,
        pod_uid="p",
        name="n",
        origin="run",
        created_at_s=1.0,
    )
    assert ledger.containers() == [added]
    assert ledger.get(added.container_id) == added
    assert ledger.of_cgroup(added.cgroup) == added


def test_a_whole_card_and_a_v1_cgroup(ledger):
    v1 = replace(draft(1), cgroup=Cgroup(inode=1001, devices="/d", freezer="/f"))
    added = ledger.add(v1, [on(0, weight=100, whole=True)])
    assert added.cgroup == v1.cgroup
    assert added.instances[0].whole_card is True
    assert ledger.of_cgroup(Cgroup(inode=1001, unified="/d")) is None


def test_it_survives_the_process(path):
    first = Ledger(path, BOOT)
    added = first.add(draft(1), [on(0)])
    first.set_policy("GPU-0", Policy.NATIVE_BURST_SHARE)
    first.set_fact("major", "240")
    first.close()
    second = Ledger(path, BOOT)
    assert second.containers() == [added]
    assert second.policies() == {"GPU-0": Policy.NATIVE_BURST_SHARE}
    assert second.facts() == {"major": "240"}
    second.close()


def test_oldest_first(ledger):
    for number in (3, 1, 2):
        ledger.add(draft(number), [on(number)])
    assert [c.created_at_s for c in ledger.containers()] == [1.0, 2.0, 3.0]


def test_share_ids_are_never_used_again(ledger):
    seen = set()
    for _ in range(5):
        added = ledger.add(draft(1), [on(0), on(1)])
        ids = {instance.share_id for instance in added.instances}
        assert not ids & seen
        seen |= ids
        ledger.remove(added.container_id)
    assert seen == set(range(1, 11))


def test_a_container_twice(ledger):
    ledger.add(draft(1), [on(0)])
    again = replace(draft(1), cgroup=Cgroup(inode=7, unified="/other"))
    with pytest.raises(Conflict) as caught:
        ledger.add(again, [on(0, 1)])
    assert str(caught.value) == (
        "container 000000000000: it holds instances already; "
        "change them with 'mgpu-cli set', or 'mgpu-cli release 000000000000' first"
    )
    assert len(ledger.containers()) == 1


def test_a_cgroup_twice(ledger):
    ledger.add(draft(1), [on(0)])
    other = replace(draft(2), cgroup=replace(draft(1).cgroup, unified="/moved"))
    with pytest.raises(Conflict) as caught:
        ledger.add(other, [on(0, 1)])
    assert str(caught.value) == (
        "cgroup /moved: it is bound already, as container 000000000000; "
        "'mgpu-cli release 000000000000' first"
    )
    assert len(ledger.containers()) == 1


def test_an_instance_twice_leaves_nothing_of_the_second_container(ledger):
    ledger.add(draft(1), [on(0, 5)])
    with pytest.raises(Conflict) as caught:
        ledger.add(draft(2), [on(1, 5), on(0, 5)])
    assert caught.value.asked == "instance 5 of device 0"
    assert [c.container_id for c in ledger.containers()] == [draft(1).container_id]
    ledger.add(draft(2), [on(1, 5)])


def test_two_instances_of_one_device_in_a_container(ledger):
    with pytest.raises(Conflict):
        ledger.add(draft(1), [on(0, 0), on(0, 1)])
    assert ledger.containers() == []


@pytest.mark.parametrize(
    "wrong", [on(0, 16), on(0, -1), on(0, 0, 0), on(0, 0, 101), on(0, 0, 1, 0)]
)
def test_the_table_itself_refuses_nonsense(ledger, wrong):
    with pytest.raises(Conflict):
        ledger.add(draft(1), [wrong])
    assert ledger.containers() == []


def test_a_container_without_instances_is_a_mistake_in_the_caller(ledger):
    with pytest.raises(ValueError):
        ledger.add(draft(1), [])


def test_update_changes_all_but_the_cards(ledger):
    added = ledger.add(draft(1), [on(0), on(1)])
    ledger.add(draft(2), [on(0, 1)])
    changed = replace(
        added,
        cgroup=Cgroup(inode=77, devices="/d"),
        online=False,
        enforcer=Enforcer.KILL,
        name="new",
        pod_uid="pod",
        instances=tuple(
            replace(i, compute_weight=50, vmem_limit_bytes=MIB, device_index=i.device_index + 4)
            for i in added.instances
        ),
    )
    assert ledger.update(changed) == changed
    assert ledger.get(added.container_id) == changed
    assert ledger.get(draft(2).container_id).instances[0].compute_weight == 30


def test_update_of_what_is_gone(ledger):
    added = ledger.add(draft(1), [on(0)])
    ledger.remove(added.container_id)
    with pytest.raises(NotFound):
        ledger.update(added)
    anew = ledger.add(draft(1), [on(0)])
    with pytest.raises(NotFound):
        ledger.update(added)  # the same id, but not the same share
    assert ledger.containers() == [anew]


def test_update_to_anothers_cgroup(ledger):
    one = ledger.add(draft(1), [on(0)])
    two = ledger.add(draft(2), [on(0, 1)])
    with pytest.raises(Conflict):
        ledger.update(replace(two, cgroup=one.cgroup))
    assert ledger.containers() == [one, two]


def test_remove_gives_back_what_it_held(ledger):
    added = ledger.add(draft(1), [on(0), on(1)])
    assert ledger.remove(added.container_id) == added
    assert ledger.containers() == []
    assert ledger.of_cgroup(added.cgroup) is None
    with pytest.raises(NotFound) as caught:
        ledger.remove(added.container_id)
    assert len(str(caught.value)) < 200


def test_a_vanished_cgroup_does_not_take_its_successor_along(ledger):
    old = ledger.add(draft(1), [on(0)])
    ledger.remove(old.container_id)
    new = ledger.add(replace(draft(1), cgroup=Cgroup(inode=5, unified="/c1")), [on(0)])
    with pytest.raises(NotFound):
        ledger.remove(old.container_id, cgroup=old.cgroup)
    assert ledger.remove(new.container_id, cgroup=replace(new.cgroup, unified="/moved")) == new


def test_find_what_a_person_types(ledger):
    one = ledger.add(replace(draft(1, name="web"), container_id="abcd" + "1" * 60), [on(0)])
    two = ledger.add(replace(draft(2, name="abcd"), container_id="abce" + "2" * 60), [on(1)])
    for text, found in (
        (one.container_id, one),
        (one.short_id, one),
        ("abcd1", one),
        ("/c1", one),
        ("/c2", two),
        ("web", one),
        ("abcd", two),  # a name goes before the beginning of an id
        ("abce", two),
    ):
        assert ledger.find(text) == found
    for text in ("", "abc", "ABCD1", "web ", "abcd%", "abcd2", "/", "/f1", "x" * 10000, "\n"):
        with pytest.raises(NotFound) as caught:
            ledger.find(text)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_find_will_not_choose(ledger):
    for number in range(1, 8):
        ledger.add(
            replace(draft(number, name="same"), container_id="abcd" + f"{number:060x}"),
            [on(number)],
        )
    for text in ("abcd", "abcd0000", "same"):
        with pytest.raises(Conflict) as caught:
            ledger.find(text)
        assert "7 containers fit" in str(caught.value)
        assert len(str(caught.value)) < 400


def test_containers_of_an_earlier_boot(path):
    before = Ledger(path, "boot-1")
    old = before.add(draft(1), [on(0)])
    before.close()
    after = Ledger(path, "boot-2")
    new = after.add(draft(2), [on(0, 1)])
    same_number = replace(draft(3), cgroup=old.cgroup)
    same = after.add(same_number, [on(0, 2)])  # inode numbers begin anew with each boot
    assert after.of_cgroup(old.cgroup) == same
    assert after.forget_other_boots() == [old]
    assert after.containers() == [new, same]
    assert after.forget_other_boots() == []
    after.close()


def test_boot_id_of_this_kernel():
    assert len(read_boot_id(Path("/proc"))) == 36


def test_policies_and_facts_are_replaced(ledger):
    assert ledger.policies() == {} and ledger.facts() == {}
    for policy in Policy:
        ledger.set_policy("GPU-0", policy)
    ledger.set_policy("GPU-1", Policy.FIXED_SHARE)
    ledger.set_fact("major", "240")
    ledger.set_fact("major", "241")
    assert ledger.policies() == {"GPU-0": Policy.NATIVE_BURST_SHARE, "GPU-1": Policy.FIXED_SHARE}
    assert ledger.facts() == {"major": "241"}


def test_a_transaction_is_all_or_nothing(ledger):
    with pytest.raises(ZeroDivisionError), ledger.transaction():
        ledger.add(draft(1), [on(0)])
        ledger.set_fact("a", "b")
        1 / 0  # noqa: B018
    assert ledger.containers() == [] and ledger.facts() == {}


def test_an_inner_failure_takes_back_its_own_part_only(ledger):
    with ledger.transaction():
        ledger.add(draft(1), [on(0)])
        with pytest.raises(Conflict):
            ledger.add(draft(2), [on(1), on(0)])
        with pytest.raises(KeyError), ledger.transaction():
            ledger.set_fact("a", "b")
            raise KeyError
        ledger.set_fact("c", "d")
    assert [c.created_at_s for c in ledger.containers()] == [1.0]
    assert ledger.facts() == {"c": "d"}


def test_an_error_of_the_caller_stays_what_it_is(ledger):
    with pytest.raises(ProcessLookupError), ledger.transaction():
        raise ProcessLookupError(3, "No such process")
    assert ledger.containers() == []


def test_file_and_folder_are_the_agents_alone(ledger, path):
    ledger.add(draft(1), [on(0)])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    names = sorted(entry.name for entry in path.parent.iterdir())
    assert names == ["state.db", "state.db-shm", "state.db-wal"]
    for entry in path.parent.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600, entry


def test_a_file_open_to_others_is_closed_to_them(path):
    path.parent.mkdir()
    path.touch(0o644)
    path.chmod(0o644)
    Ledger(path, BOOT).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_set_up_to_lose_nothing(ledger, path):
    connection = raw(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA application_id").fetchone() == (0x6D475055,)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()
    assert ledger._file.read("PRAGMA synchronous") == [(2,)]  # 2: FULL
    assert ledger._file.read("PRAGMA foreign_keys") == [(1,)]


REQUEST = Request(core=10, memory_mib=1024)
DEVICE = Device(0, "GPU-0", "card", 0, 16384 * MIB)


def bind(ledger, number):
    """As the service does it: read, decide and write in one transaction."""
    with ledger.transaction():
        cards = placement.loads(
            [DEVICE], ledger.containers(), ledger.policies(), Policy.FIXED_SHARE
        )
        return ledger.add(draft(number), placement.choose(REQUEST, cards, Strategy.BINPACK))


def test_racing_threads_never_overbook(ledger):
    bound, refused = [], []

    def work(first):
        for number in range(first, first + 5):
            try:
                bound.append(bind(ledger, number))
            except NoRoom:
                refused.append(number)

    threads = [threading.Thread(target=work, args=(n * 5,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(bound), len(refused)) == (10, 10)
    assert sorted(c.instances[0].instance_id for c in ledger.containers()) == list(range(10))


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_sees_half_a_transaction(ledger, fails):
    seen = []
    reader = threading.Thread(target=lambda: seen.append(len(ledger.containers())))
    try:
        with ledger.transaction():
            ledger.add(draft(1), [on(0)])
            reader.start()
            reader.join(0.05)
            assert seen == []
            ledger.add(draft(2), [on(1)])
            if fails:
                raise KeyError
    except KeyError:
        pass
    reader.join()
    assert seen == [0 if fails else 2]


OTHER_PROCESS = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from test_ledger import *
ledger = Ledger(Path({path!r}), BOOT)
"""


def other_process(path, code):
    head = OTHER_PROCESS.format(folder=str(Path(__file__).parent), path=str(path))
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )


def test_racing_processes_never_overbook(ledger, path):
    code = """
sys.stdin.readline()
done = 0
for number in range({first}, {first} + 8):
    try:
        bind(ledger, number)
        done += 1
    except NoRoom:
        pass
print(done)
"""
    others = [other_process(path, code.format(first=first)) for first in (100, 200)]
    answers = [other.communicate("go\n", timeout=60)[0] for other in others]
    assert sum(int(answer) for answer in answers) == 10
    assert sorted(c.instances[0].instance_id for c in ledger.containers()) == list(range(10))


def test_readers_do_not_wait_for_a_writer_of_another_process(ledger, path):
    added = ledger.add(draft(1), [on(0)])
    writer = raw(path)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM container")
    assert ledger.containers() == [added]
    writer.execute("ROLLBACK")
    writer.close()


def test_killed_between_begin_and_commit(path):
    code = """
with ledger.transaction():
    ledger.add(draft(1), [on(0)])
    ledger.set_fact("a", "b")
    print("inside", flush=True)
    sys.stdin.readline()
"""
    other = other_process(path, code)
    assert other.stdout.readline() == "inside\n"
    other.kill()
    assert other.wait() == -signal.SIGKILL
    after = Ledger(path, BOOT)
    assert after.containers() == [] and after.facts() == {}
    after.add(draft(1), [on(0)])
    after.close()


def test_killed_at_any_time_keeps_what_was_acknowledged(path):
    """The other process says each number once its change returned; then it is shot at random."""
    code = """
for number in range(1, 10**6):
    with ledger.transaction():
        if number > 1:
            ledger.remove(draft(number - 1).container_id)
        ledger.add(draft(number), [on(0), on(1)])
    print(number, flush=True)
"""
    for stop_after in (1, 3, 20):
        other = other_process(path, code)
        said = [int(other.stdout.readline()) for _ in range(stop_after)]
        other.kill()
        said += [int(line) for line in other.stdout.read().split("\n")[:-1]]
        other.wait()
        after = Ledger(path, BOOT)
        (left,) = after.containers()
        assert left.created_at_s in (said[-1], said[-1] + 1)
        assert len(left.instances) == 2
        after.remove(left.container_id)
        after.close()


def test_a_log_torn_by_a_power_cut_gives_the_changes_before_the_tear(path, tmp_path):
    ledger = Ledger(path, BOOT)
    wal = Path(f"{path}-wal")
    ended_at = [wal.stat().st_size]  # of the log, after each change
    for number in range(1, 9):
        ledger.add(draft(number), [on(number)])
        ended_at.append(wal.stat().st_size)
    database, log = path.read_bytes(), wal.read_bytes()
    ledger.close()
    assert ended_at == sorted(set(ended_at)), "every change is in the log when its call returns"
    torn = tmp_path / "torn.db"
    for size in range(ended_at[0], len(log) + 1, 1021):
        for garbage in (b"", b"\xff" * 600):
            torn.write_bytes(database)
            Path(f"{torn}-wal").write_bytes(log[:size] + garbage)
            after = Ledger(torn, BOOT)
            whole = sum(1 for end in ended_at[1:] if end <= size)
            assert [int(c.created_at_s) for c in after.containers()] == list(range(1, whole + 1))
            after.close()


def test_listing_128_containers_is_one_query(ledger):
    with ledger.transaction():
        for number in range(128):
            ledger.add(draft(number), [on(number // 16, number % 16, 1, 256)])
    queries = []
    ledger._file._connection.set_trace_callback(queries.append)
    assert len(ledger.containers()) == 128
    assert len([query for query in queries if query.startswith("SELECT")]) == 1


def test_listing_again_asks_again_only_after_a_write(ledger, path):
    first = ledger.add(draft(1), [on(0, 0, 1, 256)])
    assert ledger.containers() == [first]
    queries = []
    ledger._file._connection.set_trace_callback(queries.append)
    assert ledger.containers() == [first]
    assert not [query for query in queries if query.startswith("SELECT")]
    with pytest.raises(RuntimeError), ledger.transaction():
        second = ledger.add(draft(2), [on(0, 1, 1, 256)])
        assert ledger.containers() == [first, second]
        raise RuntimeError
    assert ledger.containers() == [first]
    other = sqlite3.connect(str(path))
    with other:
        other.execute("DELETE FROM container")
    other.close()
    assert ledger.containers() == []


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "update", "fail"]),
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(1, 100),
    ),
    max_size=30,
)


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(actions=ACTIONS)
def test_it_agrees_with_a_plain_dictionary(tmp_path, actions):
    path = tmp_path / "model.db"
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(f"{path}{suffix}"):
            os.unlink(f"{path}{suffix}")
    ledger, model = Ledger(path, BOOT), {}
    for action, number, instance_id, weight in actions:
        name = draft(number).container_id
        try:
            if action == "add":
                model[name] = ledger.add(draft(number), [on(0, instance_id, weight)])
            elif action == "remove":
                assert ledger.remove(name) == model.pop(name)
            elif action == "update":
                held = ledger.get(name)
                changed = (replace(held.instances[0], compute_weight=weight),)
                model[name] = ledger.update(replace(held, instances=changed))
            else:
                with ledger.transaction():
                    ledger.set_fact("x", "y")
                    ledger.remove(name)
                    raise KeyError
        except Conflict:
            taken = {c.instances[0].instance_id for c in model.values()}
            assert name in model or instance_id in taken
        except NotFound:
            assert name not in model
        except KeyError:
            assert action == "fail"
    assert sorted(ledger.containers(), key=lambda c: c.container_id) == [
        model[name] for name in sorted(model)
    ]
    ledger.close()
    reopened = Ledger(path, BOOT)
    assert {c.container_id for c in reopened.containers()} == set(model)
    reopened.close()


def test_schema_and_busy_time_are_what_the_page_says():
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    assert f"locked for {statefile.BUSY_TIMEOUT_S:.0f} s" in page
    assert SCHEMA.version == 1


def test_another_version_is_left_alone(path):
    Ledger(path, BOOT).close()
    connection = raw(path)
    connection.execute("PRAGMA user_version = 2")
    connection.execute("CREATE TABLE novelty (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StateUnusable) as caught:
        Ledger(path, BOOT)
    assert str(caught.value) == (
        f"ledger {path}: its version 2 is newer than this agent's 1; install the newer agent again"
    )
    assert path.read_bytes() == before
