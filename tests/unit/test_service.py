"""The service's verbs: what they answer, what they refuse, and that a refusal leaves nothing."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import List

import pytest
from front_doubles import A10, H200, PEER, Node

from mgpu.errors import (
    BadInput,
    Conflict,
    MgpuError,
    NoRoom,
    NotCapable,
    NotFound,
    RuleBroken,
    StateUnusable,
)
from mgpu.model import MIB, Enforcer, PidUse, Policy


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_bind_answers_the_new_instance(node: Node) -> None:
    node.groups.make("/containers/7b0622290a6e")
    answer = node.service.bind(
        {"target": "7b0622290a6e", "core": 30, "memory_mib": 4096, "name": "web", "pod_uid": "p"}
    )
    [row] = answer["containers"]
    # Binpack takes the smaller card, the A10.
    assert (row["container_id"], row["device_id"], row["instance_id"]) == ("7b0622290a6e", 1, 0)
    assert (row["compute_weight"], row["compute_weight_online"]) == (0, 30)
    assert (row["compute_weight_native_burst"], row["online"]) == (30, 1)
    assert (row["vmem_limit_bytes"], row["pod_uid"], row["name"]) == (4294967296, "p", "web")
    assert answer["warnings"] == []
    assert node.applied == ["7b0622290a6e".ljust(64, "0")]


def test_offline_container_has_its_weight_in_the_other_field(node: Node) -> None:
    node.bind("aaaa", online=False)
    [row] = node.service.container_info()["containers"]
    assert (row["compute_weight"], row["compute_weight_online"], row["online"]) == (30, 0, 0)


def test_unusual_but_allowed_is_warned_of(node: Node) -> None:
    node.groups.make("/containers/aaaa")
    answer = node.service.bind({"target": "aaaa", "core": 7, "memory_mib": 300})
    assert len(answer["warnings"]) == 2


@pytest.mark.parametrize("flag", ["privileged", "rdma"])
def test_containers_that_no_share_would_hold_are_refused(node: Node, flag: str) -> None:
    with pytest.raises(RuleBroken):
        node.bind("aaaa", **{flag: True})
    assert node.ledger.containers() == []


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"core": 0}, BadInput),
        ({"core": -1}, BadInput),
        ({"core": 1.5}, BadInput),
        ({"core": "many"}, BadInput),
        ({"core": True}, BadInput),
        ({"core": 10**30}, BadInput),
        ({"core": 101}, RuleBroken),
        ({"memory_mib": 0}, BadInput),
        ({"memory_mib": -5}, BadInput),
        ({"memory_mib": "1GiB"}, BadInput),
        ({"memory_mib": 255}, RuleBroken),
        ({"memory_mib": 999_999}, NoRoom),
        ({"cards": 0}, BadInput),
        ({"cards": 9}, RuleBroken),
        ({"device": "7"}, NotFound),
        ({"device": "GPU-none"}, NotFound),
    ],
)
def test_bad_requests_change_nothing(node: Node, values: dict, error: type) -> None:
    with pytest.raises(error):
        node.bind("aaaa", **values)
    assert node.ledger.containers() == []
    assert node.applied == []


def test_device_is_named_by_index_or_uuid(node: Node) -> None:
    node.bind("aaaa", device=0)
    node.bind("bbbb", device=H200.uuid)
    rows = node.service.container_info()["containers"]
    assert [(row["device_id"], row["instance_id"]) for row in rows] == [(0, 0), (0, 1)]


def test_unknown_target_leaves_nothing(node: Node) -> None:
    with pytest.raises(NotFound):
        node.service.bind({"target": "dead", "core": 30, "memory_mib": 4096})
    assert node.ledger.containers() == []


def test_a_cgroup_is_bound_once(node: Node) -> None:
    node.bind("aaaa")
    with pytest.raises(Conflict):
        node.bind("aaaa")
    assert len(node.ledger.containers()) == 1


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_cgroup_within_a_bound_one_is_refused(node: Node, inner_first: bool) -> None:
    names = ["pod", "pod/inner"]
    node.bind(names[inner_first])
    with pytest.raises(Conflict, match="one holds the other"):
        node.bind(names[not inner_first])
    node.bind("pod2")


def test_a_container_started_again_replaces_its_vanished_self(node: Node) -> None:
    node.bind("aaaa")
    before = node.ledger.find("aaaa")
    node.groups.make("/containers/aaaa")
    node.bind("aaaa")
    assert node.ledger.find("aaaa").cgroup.inode == before.cgroup.inode + 1


def test_vanished_containers_are_released(node: Node) -> None:
    node.bind("aaaa")
    node.bind("bbbb")
    assert node.service.release_vanished() == []
    gone = node.ledger.find("bbbb")
    node.groups.make("/containers/bbbb")
    assert node.service.release_vanished() == [gone.container_id]
    assert [c.short_id for c in node.ledger.containers()] == ["aaaa00000000"]


def test_a_run_ends_with_its_last_process(node: Node) -> None:
    run_id = str(node.service.start_run({"pid": 4711, "core": 30, "memory_mib": 4096}, PEER)["id"])
    assert node.service.release_vanished() == []
    node.groups.inside[node.ledger.get(run_id).cgroup.inode].clear()
    assert node.service.release_vanished() == [run_id]
    assert (node.ledger.containers(), node.groups.alive) == ([], {})


def test_room_of_vanished_containers_is_used(node: Node) -> None:
    node.bind("aaaa", core=100, memory_mib=None, device=1)
    with pytest.raises(NoRoom):
        node.bind("bbbb", device=1)
    del node.groups.alive["/containers/aaaa"]
    node.bind("bbbb", device=1)
    assert [c.short_id for c in node.ledger.containers()] == ["bbbb00000000"]


def test_seventeenth_instance(node: Node) -> None:
    for number in range(16):
        node.bind(f"{number:04}", core=1, memory_mib=256, device=1)
    with pytest.raises(NoRoom, match="16 instances"):
        node.bind("0016", core=1, memory_mib=256, device=1)


def test_what_the_kernel_refuses_is_taken_back(node: Node) -> None:
    node.refuse_apply = OSError(28, "No space left on device")
    with pytest.raises(MgpuError, match="No space left on device") as raised:
        node.bind("aaaa")
    assert raised.value.exit_code == 1
    assert node.ledger.containers() == []
    # Once for the change and once more to take away what it had done.
    assert len(node.applied) == 2


def test_what_cannot_be_taken_back_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    full = StateUnusable("ledger state.db", "no space is left on its disk", "free some")

    def remove(container_id: str) -> None:
        raise full

    node.refuse_apply = OSError(1, "Operation not permitted")
    monkeypatch.setattr(node.ledger, "remove", remove)
    with pytest.raises(MgpuError, match="Operation not permitted.*no space is left"):
        node.bind("aaaa")


def test_an_error_of_our_own_keeps_its_words(node: Node) -> None:
    node.refuse_apply = NotCapable("gate", "no CGROUP_DEVICE programs", "boot a newer kernel")
    with pytest.raises(NotCapable, match="boot a newer kernel"):
        node.bind("aaaa")
    assert node.ledger.containers() == []


def test_the_ledger_has_it_before_the_kernel(node: Node) -> None:
    seen: List[int] = []
    node.during_apply = lambda container_id: seen.append(len(node.ledger.containers()))
    node.bind("aaaa")
    assert seen == [1]


def test_racing_requests_never_overbook(node: Node) -> None:
    for number in range(20):
        node.groups.make(f"/containers/{number:04}")
    refused: List[Exception] = []

    def ask(number: int) -> None:
        try:
            node.bind(f"{number:04}", core=10, memory_mib=1024, device=1)
        except NoRoom as error:
            refused.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [i for c in node.ledger.containers() for i in c.instances]
    assert sum(i.compute_weight for i in held) == 100
    assert len({i.instance_id for i in held}) == 10
    assert len(refused) == 10


def test_run_moves_the_waiting_child(node: Node) -> None:
    answer = node.service.start_run({"pid": 4711, "core": 30, "memory_mib": 4096}, PEER)
    container = node.ledger.get(str(answer["id"]))
    assert container.cgroup.path == f"/mgpu/run-{container.short_id}"
    assert container.origin == "run"
    assert node.groups.members(container.cgroup) == [4711]


def test_run_of_a_strangers_process(node: Node) -> None:
    with pytest.raises(NotFound):
        node.service.start_run({"pid": 1, "core": 30, "memory_mib": 4096}, PEER)
    assert (node.ledger.containers(), node.groups.alive) == ([], {})


@pytest.mark.parametrize("what", ["apply", "add", "room"])
def test_run_that_fails_leaves_no_cgroup(node: Node, what: str) -> None:
    memory_mib = 4096
    if what == "apply":
        node.refuse_apply = OSError(1, "Operation not permitted")
    elif what == "add":
        node.groups.refuse_add = OSError(3, "No such process")
    else:
        memory_mib = 999_999
    with pytest.raises((MgpuError, OSError)):
        node.service.start_run({"pid": 4711, "core": 30, "memory_mib": memory_mib}, PEER)
    assert (node.ledger.containers(), node.groups.alive) == ([], {})


def test_set_changes_only_what_is_given(node: Node) -> None:
    node.bind("aaaa")
    node.service.set("aaaa", {"core": 40})
    node.service.set("aaaa", {"memory_mib": "8192"})
    node.service.set("aaaa", {"online": False, "enforcer": "observe"})
    container = node.ledger.find("aaaa")
    assert container.instances[0].compute_weight == 40
    assert container.instances[0].vmem_limit_bytes == 8589934592
    assert (container.online, container.enforcer) == (False, Enforcer.OBSERVE)
    node.service.set("aaaa", {"enforcer": "default"})
    assert node.ledger.find("aaaa").enforcer is None


def test_set_without_a_change(node: Node) -> None:
    node.bind("aaaa")
    with pytest.raises(BadInput, match="nothing to change"):
        node.service.set("aaaa", {"force": True})


def test_limit_below_what_is_in_use_needs_force(node: Node) -> None:
    node.bind("aaaa")
    node.use("aaaa", PidUse(7, 2048 * MIB))
    with pytest.raises(Conflict, match="--force"):
        node.service.set("aaaa", {"memory_mib": 2047})
    assert node.ledger.find("aaaa").instances[0].vmem_limit_bytes == 4096 * MIB
    node.service.set("aaaa", {"memory_mib": 2048})
    answer = node.service.set("aaaa", {"memory_mib": 1024, "force": True})
    info = answer["containers"][0]["vmem_info"]
    assert (info["limit_bytes"], info["used_bytes"], info["free_bytes"]) == (
        1024 * MIB,
        2048 * MIB,
        0,
    )


def test_lower_limit_without_figures_needs_force(node: Node) -> None:
    node.bind("aaaa")
    with pytest.raises(Conflict, match="not known"):
        node.service.set("aaaa", {"memory_mib": 2048})
    node.service.set("aaaa", {"memory_mib": 8192})
    node.service.set("aaaa", {"memory_mib": 2048, "force": True})


def test_set_that_the_kernel_refuses_is_taken_back(node: Node) -> None:
    node.bind("aaaa")
    before = node.ledger.find("aaaa")
    node.refuse_apply = OSError(1, "Operation not permitted")
    with pytest.raises(MgpuError):
        node.service.set("aaaa", {"core": 40})
    assert node.ledger.find("aaaa") == before


def test_set_beyond_the_room(node: Node) -> None:
    node.bind("aaaa", core=60, device=1)
    node.bind("bbbb", core=40, device=1)
    with pytest.raises(NoRoom):
        node.service.set("aaaa", {"core": 61})
    with pytest.raises(NotFound):
        node.service.set("cccc", {"core": 10})


def test_release(node: Node) -> None:
    container_id = node.bind("aaaa")
    assert node.service.release("aaaa") == {"released": container_id, "warnings": []}
    assert node.ledger.containers() == []
    assert node.applied == [container_id] * 2
    with pytest.raises(NotFound):
        node.service.release("aaaa")


def test_release_of_held_memory_needs_force(node: Node) -> None:
    node.bind("aaaa")
    node.use("aaaa", PidUse(7, MIB))
    with pytest.raises(Conflict, match="processes 7 hold"):
        node.service.release("aaaa")
    node.service.release("aaaa", force=True)
    assert node.ledger.containers() == []


def test_release_stands_though_the_kernel_lags(node: Node) -> None:
    node.bind("aaaa")
    node.refuse_apply = OSError(16, "Device or resource busy")
    answer = node.service.release("aaaa")
    assert "goes on trying" in answer["warnings"][0]
    assert node.ledger.containers() == []


def test_policy_stands_though_the_kernel_lags(node: Node) -> None:
    node.refuse_apply = OSError(16, "Device or resource busy")
    answer = node.service.set_policy("0", 1)
    assert (answer["compute_policy"], len(answer["warnings"])) == (1, 1)


def test_maps_that_cannot_be_read_do_not_undo_a_change(node: Node) -> None:
    def unreadable() -> None:
        raise OSError(9, "Bad file descriptor")

    node.figures.usage = unreadable  # type: ignore[assignment]
    node.bind("aaaa")
    [row] = node.service.container_info()["containers"]
    assert row["vmem_info"] is None


def test_device_id_is_the_cards_own_of_now(node: Node) -> None:
    node.bind("aaaa", device=1)
    node.cards.devices = (replace(A10, index=0, minor=1), replace(H200, index=1, minor=0))
    [row] = node.service.container_info()["containers"]
    assert (row["device_id"], row["minor"]) == (0, 1)


def test_release_of_a_run_ends_what_it_left(node: Node) -> None:
    answer = node.service.start_run({"pid": 4711, "core": 30, "memory_mib": 4096}, PEER)
    node.service.release(str(answer["id"]))
    assert node.groups.alive == {}


def test_policy(node: Node) -> None:
    assert node.service.policy("1")["compute_policy"] == 0
    answer = node.service.set_policy(A10.uuid, "native-burst-share")
    assert (answer["device_id"], answer["compute_policy"]) == (1, 2)
    assert node.ledger.policies() == {A10.uuid: Policy.NATIVE_BURST_SHARE}
    with pytest.raises(BadInput):
        node.service.set_policy("1", "fairest")
    with pytest.raises(NotFound):
        node.service.set_policy("2", 0)


def test_policy_that_a_share_over_several_cards_needs(node: Node) -> None:
    for device in ("0", "1"):
        node.service.set_policy(device, 2)
    node.bind("aaaa", core=40, memory_mib=8192, cards=2)
    with pytest.raises(Conflict):
        node.service.set_policy("0", 0)
    rows = node.service.container_info()["containers"]
    assert [row["vmem_limit_bytes"] for row in rows] == [4096 * MIB] * 2


def test_vmem_info_by_pid_beside_the_drivers(node: Node) -> None:
    node.bind("aaaa", device=0)
    node.use("aaaa", PidUse(9, 100, 28, 1), PidUse(8, 512 * MIB), denials=3, kills=2)
    node.cards.processes = {H200.uuid: {9: 256}}
    [row] = node.service.container_info("aaaa")["containers"]
    info = row["vmem_info"]
    assert info["used_bytes"] == 512 * MIB + 128
    assert info["free_bytes"] == 3584 * MIB - 128
    assert [pid["pid"] for pid in info["pids"]] == [8, 9]
    assert info["pids"][0]["driver_bytes"] is None
    assert info["pids"][1] == {
        "pid": 9,
        "used_bytes": 128,
        "tracked_bytes": 100,
        "unseen_bytes": 28,
        "driver_bytes": 256,
        "contexts": 1,
    }
    assert (row["tasks"], row["denials"], row["kills"]) == (2, 3, 2)


def test_no_figures_are_not_zero(node: Node) -> None:
    node.bind("aaaa")
    [row] = node.service.container_info()["containers"]
    assert (row["vmem_info"], row["tasks"], row["denials"]) == (None, None, None)


def test_device_info_follows_what_is_given_out(node: Node) -> None:
    node.bind("aaaa", core=30, memory_mib=4096, device=1)
    node.bind("bbbb", core=20, memory_mib=1024, device=1, online=False)
    first, second = node.service.device_info()["devices"]
    assert first["vmem_free_bytes"] == 143771 * MIB
    assert (second["compute_free_weight"], second["compute_free_weight_online"]) == (80, 70)
    assert second["compute_total_weight_native_burst"] == 50
    assert second["vmem_limit_bytes"] == 5120 * MIB
    assert second["vmem_free_bytes"] == (23028 - 5120) * MIB
    assert (second["instances"], second["device_state"], second["device_major"]) == (2, "ok", 240)


def test_a_lost_card_keeps_its_row_and_loses_its_figures(node: Node) -> None:
    node.bind("aaaa", device=1)
    node.cards.lost[A10.uuid] = "NVML says: GPU is lost"
    first, second = node.service.device_info()["devices"]
    assert (first["device_state"], first["vmem_used_bytes"]) == ("ok", 0)
    assert (second["device_state"], second["vmem_used_bytes"]) == ("lost", None)
    assert second["device_state_reason"] == "NVML says: GPU is lost"
    assert node.service.status()["devices_lost"] == 1
    with pytest.raises(NoRoom):
        node.bind("bbbb", device=1)


def test_without_nvml_containers_are_still_shown(node: Node) -> None:
    node.bind("aaaa")
    node.cards.missing = True
    with pytest.raises(NotCapable):
        node.service.device_info()
    with pytest.raises(NotCapable):
        node.bind("bbbb")
    [row] = node.service.container_info()["containers"]
    assert row["minor"] is None
    assert node.service.status()["devices"] == 0


def test_observed_containers_have_no_enforced_cap(node: Node) -> None:
    node.bind("aaaa", enforcer="observe")
    node.bind("bbbb")
    rows = node.service.container_info()["containers"]
    assert [row["vmem_qos_enabled"] for row in rows] == [0, 1]
    assert [row["enforcer"] for row in rows] == ["observe", "kill"]
