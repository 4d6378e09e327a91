"""Real device nodes in a folder of the test's own."""

import os
import stat

import pytest
from tests.lab import v2_mount

from mgpu.model import Cgroup, Container, Device, Instance
from mgpu.nodes import Nodes, Numbers

NUMBERS = Numbers(60, 255, 60, 254, True)
DEVICES = (Device(0, "GPU-a", "A", 0, 1), Device(1, "GPU-b", "B", 1, 1))
HOLDER = Container(
    "abcdef012345" + "0" * 52,
    Cgroup(1, "/c"),
    (Instance(1, "GPU-a", 0, 2, 30, 1),),
)
CONTROL = "mgpu0ctl-abcdef012345"


@pytest.fixture
def nodes(dev):
    return Nodes(dev, owner="0", group="0", mode=0o660)


def _numbers(dev):
    """Number, owner, group and mode of each device node."""
    found = {}
    for path in dev.iterdir():
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode):
            number = (os.major(status.st_rdev), os.minor(status.st_rdev))
            found[path.name] = (number, status.st_uid, status.st_gid, status.st_mode & 0o7777)
    return found


def _links(dev):
    return {path.name: os.readlink(str(path)) for path in (dev / "char").iterdir()}


def test_exactly_what_must_be(nodes, dev):
    nodes.ensure(NUMBERS, DEVICES, [HOLDER])
    assert _numbers(dev) == {
        "mgpu0": ((60, 0), 0, 0, 0o660),
        "mgpu1": ((60, 1), 0, 0, 0o660),
        "mgpu0inst2": ((60, 0), 0, 0, 0o660),
        CONTROL: ((60, 255), 0, 0, 0o660),
    }
    assert _links(dev) == {"60:0": "../mgpu0", "60:1": "../mgpu1", "60:255": f"../{CONTROL}"}
    nodes.ensure(NUMBERS, DEVICES[:1], [])
    assert sorted(_numbers(dev)) == ["mgpu0"]
    assert _links(dev) == {"60:0": "../mgpu0"}
    nodes.remove_all()
    assert _numbers(dev) == {} and _links(dev) == {}


def test_what_is_right_stays_as_it_is(nodes, dev):
    nodes.ensure(NUMBERS, DEVICES, [HOLDER])
    before = {p: p.lstat() for p in [*dev.iterdir(), *(dev / "char").iterdir()]}
    nodes.ensure(NUMBERS, DEVICES, [HOLDER])
    assert {p: p.lstat() for p in [*dev.iterdir(), *(dev / "char").iterdir()]} == before


def test_a_mode_an_owner_and_a_number_of_before_are_mended(nodes, dev):
    os.mknod(str(dev / "mgpu0"), stat.S_IFCHR | 0o600, os.makedev(61, 0))
    os.mknod(str(dev / "mgpu1"), stat.S_IFCHR | 0o600, os.makedev(60, 1))
    os.chown(str(dev / "mgpu1"), 1, 1)
    nodes.ensure(NUMBERS, DEVICES, [])
    assert _numbers(dev) == {
        "mgpu0": ((60, 0), 0, 0, 0o660),
        "mgpu1": ((60, 1), 0, 0, 0o660),
    }


def test_a_change_of_major_moves_the_links(nodes, dev):
    nodes.ensure(NUMBERS, DEVICES[:1], [])
    nodes.ensure(Numbers(61, 255, 61, 254, True), DEVICES[:1], [])
    assert _links(dev) == {"61:0": "../mgpu0"}


def test_links_of_the_driver_stay(nodes, dev):
    (dev / "char").mkdir()
    os.symlink("../nvidia0", str(dev / "char/60:0"))
    os.symlink("../null", str(dev / "char/1:3"))
    nodes.ensure(NUMBERS, DEVICES[:1], [])
    nodes.remove_all()
    assert _links(dev) == {"60:0": "../nvidia0", "1:3": "../null"}


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_foreign_thing_under_the_name(nodes, dev, kind):
    path = dev / "mgpu0"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("null")
    before = path.lstat()
    assert nodes.ensure(NUMBERS, DEVICES, []) == ["mgpu0"]
    assert path.lstat() == before
    assert sorted(_numbers(dev)) == ["mgpu1"]  # the rest was done
    assert _links(dev) == {"60:1": "../mgpu1"}
    nodes.remove_all()
    assert path.lstat() == before


def test_names_that_only_look_like_ours_stay(nodes, dev):
    for name in ("mgpu", "mgpux", "mgpu0x", "mgpu0inst", "nvidia0"):
        os.mknod(str(dev / name), stat.S_IFCHR | 0o600, os.makedev(1, 3))
    nodes.remove_all()
    assert len(_numbers(dev)) == 5


def test_what_a_killed_agent_left_half_made_goes(nodes, dev):
    os.mknod(str(dev / ".mgpu-new-mgpu0"), stat.S_IFCHR | 0o600, os.makedev(60, 0))
    (dev / "char").mkdir()
    os.symlink("../mgpu0", str(dev / "char/.mgpu-new-60:0"))
    nodes.ensure(NUMBERS, [], [])
    assert _numbers(dev) == {} and _links(dev) == {}


def test_all_lists_what_is_ours(nodes, dev):
    nodes.ensure(NUMBERS, DEVICES[:1], [])
    assert nodes.all() == [dev / "mgpu0", dev / "char/60:0"]


def test_a_name_that_is_taken_concerns_its_container_only(node, tmp_path):
    """The agent runs, others are bound; the bind whose node it is says what is in the way."""
    node.configure(dev_root=tmp_path)
    for name in ("mgpu0", "mgpu0inst1"):
        (tmp_path / name).write_text("mine")
    node.start_agent()
    groups = [v2_mount() / f"{node.folder.name}-{number}" for number in range(2)]
    try:
        for group in groups:
            group.mkdir()
        options = ("--device", "0", "--core", "10", "--memory", "512")
        node.cli("bind", f"/{groups[0].name}", *options)
        refused = node.cli("bind", f"/{groups[1].name}", *options, check=False)
        assert refused.returncode == 5
        assert "device node mgpu0inst1: something else has the name; move it" in refused.stderr
        assert [row["instance_id"] for row in node.containers()] == [0]
        assert node.log().count("node-lacks node=mgpu0 ") == 1
        (tmp_path / "mgpu0inst1").unlink()
        node.cli("bind", f"/{groups[1].name}", *options)
        assert stat.S_ISCHR((tmp_path / "mgpu0inst1").stat().st_mode)
    finally:
        for group in groups:
            group.rmdir()
