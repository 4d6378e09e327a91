"""Whose an allocation is, over the life of processes: fork, exec, threads, moves, used PIDs."""

import time
from pathlib import Path

import pytest
from tests.lab import wait_for

from mgpu.probes import layout


def test_the_end_of_a_process_takes_its_part_alone(stage, share, cgroup, puppet):
    other = stage.puppet(cgroup)
    puppet.alloc(1000, 0x1)
    other.alloc(30, 0x1)
    assert stage.use(share).used_bytes == 1030
    puppet.end()
    assert stage.settled(share, 30)
    assert [use.pid for use in stage.use(share).pids] == [other.pid]


def test_a_child_is_counted_on_its_own_and_frees_nothing_of_its_parents(stage, share, puppet):
    puppet.alloc(1000, 0x1)
    child = int(puppet.tell("fork"))
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 1000
    puppet.alloc(7, 0x1)
    assert {use.pid: use.tracked_bytes for use in stage.use(share).pids} == {
        puppet.pid: 1000,
        child: 7,
    }
    assert puppet.tell("end") == "back"
    assert stage.settled(share, 1000)


@pytest.mark.parametrize("verb", ["exec", "exec-in-thread"])
def test_exec_holds_nothing_of_what_was_before(stage, share, puppet, verb):
    puppet.alloc(1000, 0x1)
    assert puppet.tell(verb) == str(puppet.pid)
    assert stage.use(share).used_bytes == 0
    puppet.alloc(5, 0x2)
    assert stage.use(share).used_bytes == 5
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 5


def test_a_pid_used_again_inherits_nothing(stage, share, cgroup, puppet):
    """Objects stay behind until they are swept; their stamp tells whose they were."""
    puppet.alloc(1000, 0x1)
    assert puppet.tell("exec") == str(puppet.pid)  # the same PID, another process to the programs
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 0
    puppet.alloc(20, 0x1)
    stage.tables.sweep_objects()
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 0, "the new one was swept though its process lives"
    puppet.alloc(20, 0x1)
    puppet.end()
    assert stage.settled(share, 0)
    assert stage.tables.sweep_objects() >= 1
    assert stage.tables.sweep_objects() == 0


def test_a_new_process_begins_with_nothing_though_the_end_of_the_last_was_not_seen(
    stage, share, cgroup, puppet
):
    """A PID comes round again while the maps still know what its last holder had."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    reused = stage.unused_pid()
    stage.pretend(reused, share, 1000)
    assert stage.use(share).used_bytes == 1000
    for _ in range(50):  # others fork meanwhile
        last.write_text(str(reused - 1))
        child = int(puppet.tell("fork"))
        puppet.alloc(7, 0x9)
        if child == reused:
            break
        puppet.tell("end")
        assert stage.settled(share, 1000)
    else:
        pytest.skip("the PID never came round: the machine is too busy")
    assert stage.use(share).used_bytes == 7
    puppet.tell("end")
    assert stage.settled(share, 0)


def test_most_ends_are_seen_by_the_kernel_itself(stage, share, cgroup):
    """With nobody there who would sweep."""
    for _ in range(10):
        puppet = stage.puppet(cgroup)
        puppet.alloc(100, 0x1)
        puppet.end()
        time.sleep(0.05)  # no system call on a map meanwhile: it could hide the event
    assert stage.use(share).used_bytes <= 300
    assert stage.settled(share, 0)


def test_who_is_in_no_container_is_not_counted(stage, share):
    puppet = stage.puppet()
    assert puppet.alloc(10 << 30, 0x1) == "0"
    assert stage.use(share).used_bytes == 0
    assert puppet.pid not in stage.tables.pids()


def test_who_moves_in_is_counted_from_then_on(stage, share, cgroup):
    puppet = stage.puppet()
    puppet.alloc(100, 0x1)
    (cgroup / "cgroup.procs").write_text(str(puppet.pid))
    puppet.alloc(30, 0x2)
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 30


def test_a_nested_cgroup_is_its_containers(stage, share, cgroup):
    nested = cgroup / "a"
    deep = nested / "b"
    deep.mkdir(parents=True)
    puppet = stage.puppet(deep)
    puppet.alloc(30, 0x1)
    assert stage.use(share).used_bytes == 30
    stage.end_puppets()
    deep.rmdir()
    nested.rmdir()


def test_a_process_that_outlives_its_instance_leaves_the_next_one_clean(
    stage, share, cgroup, puppet
):
    key = cgroup.stat().st_ino
    puppet.alloc(1000, 0x1)
    stage.release(key, (share,))
    (second,) = stage.shares()
    stage.bind(key, (second,))
    puppet.free(0x1)
    assert stage.use(second).used_bytes == 0
    puppet.alloc(40, 0x2)
    assert stage.use(second).used_bytes == 40
    puppet.end()
    assert stage.settled(second, 0)
    stage.release(key, (second,))


def test_a_process_that_moves_from_one_container_to_another(stage, share, cgroup, puppet):
    with stage.cgroup("two") as other:
        key = other.stat().st_ino
        (second,) = stage.shares()
        stage.bind(key, (second,))
        puppet.alloc(1000, 0x1)
        (other / "cgroup.procs").write_text(str(puppet.pid))
        puppet.alloc(40, 0x2)
        assert (stage.use(share).used_bytes, stage.use(second).used_bytes) == (1000, 40)
        puppet.end()
        assert stage.settled(share, 0)
        assert stage.settled(second, 0)
        stage.release(key, (second,))


# ---- cgroup v1 -----------------------------------------------------------------------------


@pytest.fixture
def v1(stage, devices_v1):
    """A v1 cgroup with a share of 1 GiB bound to it: folder, key, share."""
    folder = devices_v1.devices.mount / stage.name
    folder.mkdir()
    hierarchy = next(
        int(words[1])
        for words in map(str.split, Path("/proc/cgroups").read_text().splitlines())
        if words[0] == "devices"
    )
    key = folder.stat().st_ino | hierarchy << layout.ROOT_SHIFT
    (share_id,) = stage.shares()
    stage.bind(key, (share_id,))
    yield folder, key, share_id
    stage.end_puppets()
    stage.release(key, (share_id,))
    assert wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_who_begins_in_a_v1_cgroup_is_followed_with_all_it_starts(stage, v1):
    folder, _, share = v1
    puppet = stage.puppet(folder)
    puppet.alloc(1, 0x1)
    puppet.alloc(20, 0x2, verb="thread")
    puppet.alloc(300, 0x3, verb="old-thread")
    assert stage.use(share).used_bytes == 321
    child = int(puppet.tell("fork"))
    puppet.alloc(4000, 0x1)
    assert puppet.tell("exec") == str(child)
    puppet.alloc(50000, 0x1)
    assert stage.use(share).used_bytes == 50321
    puppet.tell("end")


def test_who_moves_into_a_v1_cgroup_is_followed_with_the_threads_it_has(stage, v1):
    folder, _, share = v1
    puppet = stage.puppet()
    (folder / "cgroup.procs").write_text(str(puppet.pid))
    puppet.alloc(1, 0x1)
    puppet.alloc(20, 0x2, verb="old-thread")
    assert stage.use(share).used_bytes == 21


def test_who_was_in_a_v1_cgroup_before_it_was_bound_is_followed_when_told(stage, v1):
    folder, key, share = v1
    stage.release(key, (share,))
    puppet = stage.puppet(folder)
    stage.bind(key, (share,))
    stage.tables.follow([puppet.pid], key)
    puppet.alloc(1, 0x1)
    puppet.alloc(20, 0x2, verb="old-thread")
    assert stage.use(share).used_bytes == 21


def test_nobody_is_followed_any_more_once_the_cgroup_is_released(stage, v1):
    folder, key, share = v1
    puppet = stage.puppet(folder)
    stage.tables.unbind(key)
    puppet.alloc(1, 0x1)
    assert stage.use(share).used_bytes == 0
