"""Cgroup paths as runtimes make them, and who is found by them in a tree of plain folders."""

from pathlib import Path

import pytest

from mgpu.cgroups import MAX_LEVELS, Cgroups, Mounts
from mgpu.containers import Containers, read_path
from mgpu.errors import BadInput, NotFound

ID = "0123456789abcdef" * 4
OTHER = "0123456789abcdee" * 4
UID = "3f2c7d7e-0a5c-4e0f-9d1b-2b6a0c9e8f11"
UID_ = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "pod", "below"),
    [
        # Docker, systemd and cgroupfs driver; rootless.
        (f"/system.slice/docker-{ID}.scope", "", ""),
        (f"/docker/{ID}", "", ""),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope", "", ""),
        # Podman, systemd and cgroupfs manager; crun puts the processes one further down.
        (f"/machine.slice/libpod-{ID}.scope", "", ""),
        (f"/machine.slice/libpod-{ID}.scope", "", "/container"),
        (f"/libpod_parent/libpod-{ID}", "", ""),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", "", ""),
        # The kubelet with containerd and CRI-O, each class of service, both drivers.
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice"
            f"/cri-containerd-{ID}.scope",
            UID,
            "",
        ),
        (
            f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice"
            f"/crio-{ID}.scope",
            UID,
            "/init.scope",
        ),
        (f"/kubepods.slice/kubepods-pod{UID_}.slice/docker-{ID}.scope", UID, ""),
        (f"/kubepods/burstable/pod{UID}/{ID}", UID, ""),
        (f"/kubepods/pod{UID}/{ID}", UID, "/nested/more"),
        # Static pods of the kubelet: the uid is a hash.
        (f"/kubepods/burstable/pod{'ab' * 16}/{ID}", "ab" * 16, ""),
        # containerd given the cgroupfs driver under a kubelet with systemd's.
        (f"/system.slice/containerd.service/kubepods-pod{UID_}.slice:cri-containerd:{ID}", UID, ""),
        # kubelet inside a container (kind): the innermost is meant.
        (f"/docker/{OTHER}/kubelet/kubepods/pod{UID}/{ID}", UID, ""),
    ],
)
def test_paths_of_runtimes(path, pod, below):
    assert read_path(path + below) == (ID, pod, path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/user.slice/user-1000.slice/session-1.scope",
        f"/machine.slice/libpod-conmon-{ID}.scope",
        f"/system.slice/crio-conmon-{ID}.scope",
        f"/docker/{ID[:63]}",
        f"/docker/{ID}0",
        f"/docker/{ID.upper()}",
        "/mgpu/run-0123456789ab",
    ],
)
def test_paths_of_nobody(path):
    assert read_path(path) is None


@pytest.fixture
def node(tmp_path):
    """A hybrid node of plain folders."""
    for name in ("unified", "devices", "freezer", "proc"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def containers(node):
    mounts = Mounts(node / "unified", node / "devices", node / "freezer")
    return Containers(Cgroups(node / "proc", mounts))


def _make(node, path, *hierarchies):
    for name in hierarchies or ("unified", "devices", "freezer"):
        (node / name / path.lstrip("/")).mkdir(parents=True)


def _process(node, pid, unified, devices=None, freezer=None):
    folder = node / "proc" / str(pid)
    folder.mkdir()
    lines = [f"9:freezer:{freezer or devices or unified}", f"8:devices:{devices or unified}"]
    (folder / "cgroup").write_text("\n".join([*lines, f"0::{unified}"]) + "\n")


def _inode(path: Path):
    return path.stat().st_ino


def test_by_each_kind_of_target(node, containers):
    path = f"/machine.slice/libpod-{ID}.scope"
    _make(node, path + "/container")
    _process(node, 42, path + "/container")
    found = containers.resolve(ID)
    container_id, cgroup, pod_uid, name = found
    assert (container_id, pod_uid, name) == (ID, "", "")
    assert (cgroup.unified, cgroup.devices, cgroup.freezer) == (path, path, path)
    assert cgroup.inode == _inode(node / "unified" / path[1:])
    for target in (ID[:12], "42", path, path + "/container", str(node / "devices") + path):
        assert containers.resolve(target) == found


def test_docker_on_a_hybrid_node_has_no_unified_cgroup_of_its_own(node, containers):
    _make(node, "/system.slice/docker.service")
    _make(node, f"/docker/{ID}", "devices", "freezer")
    _process(node, 42, "/system.slice/docker.service", f"/docker/{ID}")
    container_id, cgroup, _, _ = containers.resolve("42")
    assert container_id == ID
    assert (cgroup.hierarchy, cgroup.unified) == ("devices", None)
    assert (cgroup.devices, cgroup.freezer) == (f"/docker/{ID}",) * 2
    assert containers.resolve(ID[:20])[1] == cgroup


def test_a_pod(node, containers):
    _make(node, f"/kubepods/pod{UID}/{ID}")
    assert containers.resolve(ID)[2] == UID


def test_a_cgroup_that_no_runtime_made(node, containers):
    _make(node, "/batch/job-7")
    _process(node, 42, "/batch/job-7")
    container_id, cgroup, pod_uid, name = containers.resolve("/batch/job-7")
    assert len(container_id) == 64 and set(container_id) <= set("0123456789abcdef")
    assert (cgroup.unified, pod_uid, name) == ("/batch/job-7", "", "job-7")
    assert containers.resolve("42") == (container_id, cgroup, pod_uid, name)


@pytest.mark.parametrize(
    "path",
    [
        "/kubepods.slice/kubepods-burstable.slice",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice",
        f"/kubepods/besteffort/pod{UID}",
        "/docker",
        "/libpod_parent",
        "/system.slice/docker.service",
        "/mgpu",
    ],
)
def test_what_holds_the_containers_of_others(node, containers, path):
    _make(node, path)
    with pytest.raises(BadInput, match="not one container's but holds those of others"):
        containers.resolve(path)


def test_a_cgroup_with_a_container_in_it(node, containers):
    _make(node, f"/batch/job-7/nested/libpod-{ID}")
    with pytest.raises(BadInput, match=f"container {ID[:12]} is in it; give one of its"):
        containers.resolve("/batch/job-7")
    assert containers.resolve(f"/batch/job-7/nested/libpod-{ID}")[0] == ID


def test_a_container_with_containers_in_it(node, containers):
    _make(node, f"/docker/{ID}/docker/{OTHER}")
    assert containers.resolve(f"/docker/{ID}")[0] == ID
    assert containers.resolve(OTHER)[0] == OTHER


def test_a_cgroup_that_the_programs_do_not_reach(node, containers):
    at_limit = "/a" * MAX_LEVELS
    _make(node, at_limit + "/b")
    assert containers.resolve(at_limit)[3] == "a"
    with pytest.raises(BadInput, match="more than 16 levels below the root"):
        containers.resolve(at_limit + "/b")


def test_levels_are_those_of_the_programs():
    header = (Path(__file__).parents[2] / "bpf/mgpu.h").read_text()
    assert f"#define MGPU_MAX_LEVELS {MAX_LEVELS} " in header


def test_a_beginning_that_two_containers_share(node, containers):
    _make(node, f"/docker/{ID}")
    _make(node, f"/docker/{OTHER}")
    with pytest.raises(BadInput, match="several containers begin so.*give more digits"):
        containers.resolve(ID[:12])
    assert containers.resolve(ID[:16])[0] == ID


@pytest.mark.parametrize("target", ["f" * 12, "f" * 64, "12345678901234"])
def test_an_id_that_is_not_here(containers, target):
    with pytest.raises(NotFound, match="no container with this id"):
        containers.resolve(target)


@pytest.mark.parametrize("target", ["42", "4194305", "9999999999"])
def test_a_pid_that_is_not_here(containers, target):
    with pytest.raises(NotFound, match="no such process"):
        containers.resolve(target)


def test_a_pid_outside_any_cgroup_of_its_own(node, containers):
    _process(node, 42, "/")
    with pytest.raises(BadInput, match="in no cgroup of its own"):
        containers.resolve("42")


@pytest.mark.parametrize(
    "target", ["", "0", "-1", "x", "abc", "ABCDEF012345", "a" * 65, "1.5", "/"]
)
def test_what_is_no_target(containers, target):
    with pytest.raises(BadInput):
        containers.resolve(target)


def test_a_path_that_is_not_here(containers):
    with pytest.raises(NotFound, match="no such cgroup"):
        containers.resolve("/nobody")


def test_a_container_that_ends_while_it_is_looked_up(node, containers):
    _process(node, 42, f"/docker/{ID}")
    with pytest.raises(NotFound, match="no such cgroup"):
        containers.resolve("42")
