"""Cgroups of this kernel."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from mgpu.cgroups import Cgroups, Mounts
from mgpu.errors import BadInput, Conflict, NotFound

PROC = Path("/proc")


@pytest.fixture(params=["all", "unified", "devices"])
def every(request, cgroups):
    """The hierarchies of this node, then each kind alone as other nodes have it."""
    if request.param == "all":
        return cgroups
    tree = getattr(cgroups, request.param)
    if tree is None:
        pytest.skip(f"no {request.param} hierarchy is mounted below /sys/fs/cgroup")
    return Cgroups(PROC, Mounts(**{request.param: tree.mount}))


@pytest.fixture
def name(request):
    return f"test-cg-{os.getpid()}"


@pytest.fixture
def group(every, name):
    made = every.create(name)
    yield made
    every.remove(made)


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "1000"])
    yield process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_made_filled_found_and_removed(every, name):
    group = every.create(name)
    process = subprocess.Popen(["sleep", "1000"])
    assert every.exists(group) and not every.populated(group)
    every.add(group, process.pid)
    assert every.members(group) == [process.pid]
    assert every.populated(group)
    assert every.of_pid(process.pid) == group
    assert every.of_path(f"/mgpu/{name}") == group
    with pytest.raises(Conflict, match="processes are in it"):
        every.remove(group)
    assert every.exists(group)
    process.kill()
    process.wait()
    every.remove(group)
    assert not every.exists(group)
    every.remove(group)
    assert every.members(group) == [] and not every.populated(group)


def test_the_full_path_names_it_too(every, group):
    for tree in (every.unified, every.devices, every.freezer):
        if tree is not None:
            assert every.of_path(str(tree.directory(group.path))) == group


def test_the_id_of_a_unified_cgroup_is_its_inode_here(unified, name):
    made = unified.create(name)
    assert made.inode == os.stat(str(unified.unified.directory(made.unified))).st_ino
    assert unified.unified.inode(made.unified + "/nothing") is None
    unified.remove(made)


def test_found_again_by_its_inode(every, group):
    assert every.find(group.hierarchy, group.inode) == group
    assert every.find(group.hierarchy, group.inode + (1 << 40)) is None
    assert every.find("elsewhere", group.inode) is None


def test_members_of_cgroups_inside(every, group, sleeper):
    tree = every.unified or every.devices
    inner = f"{group.path}/a/b"
    tree.make(inner)
    tree.add(inner, sleeper)
    assert every.members(group) == [sleeper]
    assert every.populated(group)
    tree.add("/", sleeper)


def test_the_same_path_later_is_another_cgroup(every, name):
    first = every.create(name)
    every.remove(first)
    second = every.create(name)
    assert second != first and not every.exists(first)
    every.remove(first)
    assert every.exists(second)
    every.remove(second)


def test_a_name_twice(every, group, name):
    with pytest.raises(Conflict, match="there already"):
        every.create(name)
    assert every.exists(group)


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "-x", "x" * 200, "a b"])
def test_bad_names(cgroups, bad):
    with pytest.raises(BadInput):
        cgroups.create(bad)


def test_a_dead_process(every, group):
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(NotFound):
        every.add(group, process.pid)
    with pytest.raises(NotFound):
        every.of_pid(process.pid)


def test_a_process_outside_any_cgroup_of_its_own(every, group, sleeper):
    every.add(group, sleeper)
    for tree in (every.unified, every.devices, every.freezer):
        if tree is not None:
            tree.add("/", sleeper)
    with pytest.raises(BadInput, match="in no cgroup of its own"):
        every.of_pid(sleeper)


@pytest.mark.parametrize("bad", ["/", "//", "/sys/fs/cgroup", "x", "/a/../b", "/a\0b", ""])
def test_bad_paths(cgroups, bad):
    with pytest.raises((BadInput, NotFound)):
        cgroups.of_path(bad)


def test_unknown_path(every):
    with pytest.raises(NotFound, match="no such cgroup"):
        every.of_path("/no-such-cgroup")


def test_ours_go_and_what_is_known_stays(unified, sleeper):
    """In a tree that begins at a cgroup of the test's own: others use /mgpu meanwhile."""
    base = f"/mgpu/test-ours-{os.getpid()}"
    whole = unified.unified
    whole.make(base)
    inside = Cgroups(PROC, Mounts(unified=whole.directory(base)))
    tree = inside.unified
    for path in ("/mgpu/kept/inner", "/mgpu/stray/inner"):
        tree.make(path)
    tree.add("/mgpu/stray/inner", sleeper)
    assert inside.remove_ours(["/mgpu/kept"]) == ["/mgpu/stray/inner", "/mgpu/stray"]
    assert tree.children("/mgpu") == ["kept"]
    assert tree.own_members("/") == [sleeper]
    assert inside.remove_ours() == ["/mgpu/kept/inner", "/mgpu/kept"]
    assert tree.children("/") == []
    whole.add("/", sleeper)
    whole.remove(base)
    whole.remove_if_empty("/mgpu")
