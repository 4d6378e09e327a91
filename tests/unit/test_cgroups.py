"""What is read of /proc/self/mountinfo, /proc/PID/cgroup and devices.list."""

from pathlib import Path

import pytest

from mgpu.cgroups import Mounts, find_mounts, open_cgroups, own_paths, parse_paths
from mgpu.cgroups.gate import plan_of
from mgpu.cgroups.v1 import Rule, allows_all, parse_rules
from mgpu.errors import NotCapable, NotFound
from mgpu.nodes import Numbers

ROOT = Path("/sys/fs/cgroup")

UNIFIED_ONLY = (
    "22 1 0:20 / /proc rw,relatime shared:5 - proc proc rw\n"
    "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
)
HYBRID = (
    "29 23 0:25 / /sys/fs/cgroup ro,nosuid shared:8 - tmpfs tmpfs ro,mode=755\n"
    "30 29 0:26 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n"
    "31 29 0:27 / /sys/fs/cgroup/systemd rw shared:10 - cgroup cgroup rw,xattr,name=systemd\n"
    "35 29 0:31 / /sys/fs/cgroup/devices rw shared:14 - cgroup cgroup rw,devices\n"
    "36 29 0:32 / /sys/fs/cgroup/freezer rw shared:15 - cgroup cgroup rw,freezer\n"
)


def test_mounts_of_a_unified_node():
    assert find_mounts(UNIFIED_ONLY, ROOT) == Mounts(unified=ROOT)


def test_mounts_of_a_hybrid_node():
    assert find_mounts(HYBRID, ROOT) == Mounts(ROOT / "unified", ROOT / "devices", ROOT / "freezer")


def test_controllers_mounted_together():
    text = "35 29 0:31 / /sys/fs/cgroup/a\\040b rw - cgroup cgroup rw,devices,freezer\n"
    assert find_mounts(text, ROOT) == Mounts(None, ROOT / "a b", ROOT / "a b")


def test_mounts_elsewhere_are_not_ours():
    assert find_mounts(HYBRID, Path("/elsewhere")) == Mounts()


def test_a_node_without_cgroups(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("22 1 0:20 / /proc rw - proc proc rw\n")
    with pytest.raises(NotCapable, match="no cgroup hierarchy is mounted there"):
        open_cgroups(tmp_path, ROOT)


def test_a_pid_that_is_not_there(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(UNIFIED_ONLY)
    with pytest.raises(NotFound, match="PID 7: no such process"):
        open_cgroups(tmp_path, ROOT).of_pid(7)


def test_paths_of_a_process():
    text = "12:devices:/a\n11:cpu,cpuacct:/x\n10:freezer:/f:1\n1:name=systemd:/y\n0::/u\n"
    assert parse_paths(text) == {"devices": "/a", "freezer": "/f:1", "unified": "/u"}


@pytest.mark.parametrize(
    ("paths", "own"),
    [
        # A login on a unified node, root and slices.
        ({"unified": "/"}, {}),
        ({"unified": "/user.slice"}, {}),
        ({"unified": "/init.scope"}, {}),
        ({"unified": "/gone.scope (deleted)"}, {}),
        ({"unified": "/user.slice/session-1.scope"}, {"unified": "/user.slice/session-1.scope"}),
        # A v1 node.
        ({"devices": "/docker/x", "freezer": "/docker/x"},) * 2,
        ({"devices": "/docker/x", "freezer": "/"}, {"devices": "/docker/x"}),
        # Podman on a hybrid node: one path in all.
        ({"unified": "/m/c", "devices": "/m/c", "freezer": "/m/c"},) * 2,
        # Docker on a hybrid node: all its containers in its service's unified cgroup.
        (
            {"unified": "/system.slice/docker.service", "devices": "/docker/x"},
            {"devices": "/docker/x"},
        ),
        # A session on a hybrid node: the devices cgroup is that of all users.
        (
            {"unified": "/user.slice/s.scope", "devices": "/user.slice"},
            {"unified": "/user.slice/s.scope"},
        ),
        # One above the other.
        ({"unified": "/a/b", "devices": "/a"}, {"unified": "/a/b"}),
        ({"unified": "/a", "devices": "/a/b"}, {"devices": "/a/b"}),
        # Only its freezer cgroup is its own: that says nothing.
        ({"unified": "/", "devices": "/", "freezer": "/f"}, {}),
    ],
)
def test_own_paths(paths, own):
    assert own_paths(paths) == own


def test_rules_of_the_devices_controller():
    rules = parse_rules("c *:* m\nb 8:* rw\nc 195:255 rwm\n")
    assert rules == [
        Rule("c", None, None, "m"),
        Rule("b", 8, None, "rw"),
        Rule("c", 195, 255, "rwm"),
    ]
    assert [rule.opens for rule in rules] == [False, True, True]
    assert str(rules[0]) == "c *:* m"
    assert not allows_all(rules)
    assert allows_all(parse_rules("a *:* rwm\n"))


def test_what_a_holder_of_two_cards_opens():
    plan = plan_of(Numbers(195, 255, 510, 0, False, (508,)), [0, 3])
    assert plan.held == {(195, 0), (195, 3), (195, 255), (510, 0)}
    assert {(195, 1), (195, 2), (195, 31), (195, 254), (510, 1)} <= plan.closed
    assert not plan.held & plan.closed
    assert plan.majors == {195, 508, 510}


def test_who_holds_nothing_opens_nothing():
    plan = plan_of(Numbers(195, 255, 510, 0, False), [])
    assert plan.held == set()
    assert {(195, 0), (195, 255), (510, 0)} <= plan.closed


def test_numbers_of_a_simulation():
    plan = plan_of(Numbers(60, 255, 60, 254, True), [1])
    assert plan.held == {(60, 1), (60, 255), (60, 254)}
    assert (60, 254) not in plan.closed and (60, 0) in plan.closed


def test_a_node_where_uvm_is_not_loaded():
    plan = plan_of(Numbers(195, 255, -1, 0, False), [0])
    assert plan.held == {(195, 0), (195, 255)}
    assert plan.majors == {195}
    assert all(major == 195 for major, _ in plan.closed)
