"""The device gate on real cgroups. Cards are simulated: ENXIO is what an allowed open gives."""

import errno
import os
from pathlib import Path

import gate_programs
import pytest

from mgpu import bpf
from mgpu.cgroups import Cgroups, Mounts, v1
from mgpu.cgroups.gate import Gate
from mgpu.errors import Conflict, NotCapable, NotFound
from mgpu.nodes import Nodes

NULL = (1, 3)
EXCLUSIVE = 0


@pytest.fixture
def numbers():
    return Nodes().numbers()


@pytest.fixture
def program(unified, numbers):
    fd = gate_programs.load("mgpu_gate", numbers.card_major)
    yield fd
    os.close(fd)


@pytest.fixture
def group(cgroups):
    made = cgroups.create(f"test-gate-{os.getpid()}")
    yield made
    cgroups.remove(made)


@pytest.fixture
def v2_only(unified):
    return Cgroups(Path("/proc"), Mounts(unified=unified.unified.mount))


@pytest.fixture
def v1_only(devices_v1):
    return Cgroups(Path("/proc"), Mounts(devices=devices_v1.devices.mount))


@pytest.fixture
def group_v2(v2_only):
    made = v2_only.create(f"test-v2-{os.getpid()}")
    yield made
    v2_only.remove(made)


@pytest.fixture
def group_v1(v1_only):
    made = v1_only.create(f"test-v1-{os.getpid()}")
    yield made
    v1_only.remove(made)


def _ids(cgroups, cgroup):
    return [p.program_id for p in cgroups.attached(cgroup)]


def _id(fd):
    return bpf.program_info(fd).program_id


def _attach(cgroups, path, fd, flags):
    with cgroups.unified.opened(path) as cgroup_fd:
        bpf.prog_attach(cgroup_fd, fd, bpf.ATTACH_CGROUP_DEVICE, flags)


def _detach(cgroups, path, fd):
    with cgroups.unified.opened(path) as cgroup_fd:
        bpf.prog_detach(cgroup_fd, fd, bpf.ATTACH_CGROUP_DEVICE)


@pytest.fixture
def foreign():
    fd = gate_programs.load("sd_devices", 10)
    yield fd
    os.close(fd)


# Unified


def test_closing_decides_what_opens(v2_only, group_v2, program, numbers, dev):
    gate = Gate(v2_only, lambda: program)
    card = (numbers.card_major, 0)
    assert gate_programs.open_in(v2_only, group_v2, *card, dev) == errno.ENXIO
    assert not gate.is_closed(group_v2)
    gate.close(group_v2, numbers, [])
    assert gate.is_closed(group_v2)
    assert gate_programs.open_in(v2_only, group_v2, *card, dev) == errno.EPERM
    assert gate_programs.open_in(v2_only, group_v2, *NULL, dev) == 0
    gate.open(group_v2)
    assert not gate.is_closed(group_v2)
    assert gate_programs.open_in(v2_only, group_v2, *card, dev) == errno.ENXIO


def test_closing_again_changes_nothing(v2_only, group_v2, program, numbers):
    gate = Gate(v2_only, lambda: program)
    for _ in range(3):
        gate.close(group_v2, numbers, [0])
        assert _ids(v2_only, group_v2) == [_id(program)]


def test_a_cgroup_inside_inherits(v2_only, group_v2, program, numbers, dev):
    Gate(v2_only, lambda: program).close(group_v2, numbers, [])
    v2_only.unified.make(f"{group_v2.unified}/inner")
    inner = v2_only.of_path(f"{group_v2.unified}/inner")
    card = (numbers.card_major, 0)
    assert gate_programs.open_in(v2_only, inner, *card, dev) == errno.EPERM


def test_foreign_programs_stay(v2_only, group_v2, program, foreign, numbers, dev):
    _attach(v2_only, group_v2.unified, foreign, bpf.F_ALLOW_MULTI)
    gate = Gate(v2_only, lambda: program)
    gate.close(group_v2, numbers, [])
    assert set(_ids(v2_only, group_v2)) == {_id(foreign), _id(program)}
    assert gate_programs.open_in(v2_only, group_v2, 10, 200, dev) == errno.EPERM
    gate.open(group_v2)
    assert _ids(v2_only, group_v2) == [_id(foreign)]


def test_a_newer_program_takes_the_place_of_the_old(v2_only, group_v2, program, foreign, numbers):
    newer = gate_programs.load("mgpu_gate", numbers.card_major)
    try:
        Gate(v2_only, lambda: program).close(group_v2, numbers, [0])
        _attach(v2_only, group_v2.unified, foreign, bpf.F_ALLOW_MULTI)
        gate = Gate(v2_only, lambda: newer)
        assert not gate.is_closed(group_v2)
        gate.close(group_v2, numbers, [0])
        # In its very place: it was replaced, not detached and attached.
        assert _ids(v2_only, group_v2) == [_id(newer), _id(foreign)]
    finally:
        os.close(newer)


def test_a_kernel_that_cannot_replace(v2_only, group_v2, program, numbers, monkeypatch):
    """Before 5.6 the flag is refused: the old one goes when the new one is there."""
    newer = gate_programs.load("mgpu_gate", numbers.card_major)
    attach, detach, order = bpf.prog_attach, bpf.prog_detach, []

    def old_kernel(cgroup_fd, prog_fd, attach_type, flags, replace_fd=-1):
        if flags & bpf.F_REPLACE:
            raise OSError(errno.EINVAL, "Invalid argument")
        order.append("attach")
        attach(cgroup_fd, prog_fd, attach_type, flags)

    def seen(*arguments):
        order.append("detach")
        detach(*arguments)

    try:
        Gate(v2_only, lambda: program).close(group_v2, numbers, [0])
        monkeypatch.setattr(bpf, "prog_attach", old_kernel)
        monkeypatch.setattr(bpf, "prog_detach", seen)
        Gate(v2_only, lambda: newer).close(group_v2, numbers, [0])
        assert order == ["attach", "detach"]
        assert _ids(v2_only, group_v2) == [_id(newer)]
    finally:
        os.close(newer)


def test_several_old_ones_become_one(v2_only, group_v2, program, numbers):
    olds = [gate_programs.load("mgpu_gate", numbers.card_major) for _ in range(2)]
    for old in olds:
        _attach(v2_only, group_v2.unified, old, bpf.F_ALLOW_MULTI)
    Gate(v2_only, lambda: program).close(group_v2, numbers, [0])
    assert _ids(v2_only, group_v2) == [_id(program)]
    for old in olds:
        os.close(old)


@pytest.mark.parametrize("inner", ["", "/inner"])
def test_an_exclusive_program_is_named(v2_only, group_v2, program, foreign, numbers, inner):
    _attach(v2_only, group_v2.unified, foreign, EXCLUSIVE)
    if inner:
        v2_only.unified.make(group_v2.unified + inner)
    target = v2_only.of_path(group_v2.unified + inner)
    with pytest.raises(Conflict) as caught:
        Gate(v2_only, lambda: program).close(target, numbers, [0])
    assert str(caught.value) == (
        f"cgroup {target.unified}: program {_id(foreign)} (sd_devices) is attached to "
        f"{group_v2.unified} exclusively: the kernel lets none be beside it; "
        "let its owner attach it with BPF_F_ALLOW_MULTI, or detach it"
    )
    _detach(v2_only, group_v2.unified, foreign)


def test_a_program_above_that_would_yield_to_ours_is_named(
    v2_only, group_v2, program, foreign, numbers, dev
):
    """Attached so that any below replaces it: ours would take away what it closes."""
    _attach(v2_only, group_v2.unified, foreign, bpf.F_ALLOW_OVERRIDE)
    v2_only.unified.make(f"{group_v2.unified}/inner")
    inner = v2_only.of_path(f"{group_v2.unified}/inner")
    with pytest.raises(Conflict) as caught:
        Gate(v2_only, lambda: program).close(inner, numbers, [0])
    assert str(caught.value) == (
        f"cgroup {inner.unified}: program {_id(foreign)} (sd_devices) on {group_v2.unified} is "
        "attached with BPF_F_ALLOW_OVERRIDE: the kernel would ask it no more once ours is there; "
        "let its owner attach it with BPF_F_ALLOW_MULTI"
    )
    assert gate_programs.open_in(v2_only, inner, 10, 200, dev) == errno.EPERM
    _detach(v2_only, group_v2.unified, foreign)


def test_what_cannot_be_guarded_keeps_nothing_else_from_it(v2_only, group_v2, program, foreign):
    for name in ("a", "b"):
        v2_only.unified.make(f"{group_v2.unified}/{name}")
    _attach(v2_only, f"{group_v2.unified}/a", foreign, EXCLUSIVE)
    gate = Gate(v2_only, lambda: program)
    for _ in range(2):
        gate.guard([f"{group_v2.unified}/*"])
    a, b = (v2_only.of_path(f"{group_v2.unified}/{name}") for name in "ab")
    assert (_ids(v2_only, a), _ids(v2_only, b)) == ([_id(foreign)], [_id(program)])


def test_a_thousand_come_and_go_without_a_trace(v2_only, program, numbers):
    """Half are released, half vanish with their gate."""
    gate = Gate(v2_only, lambda: program)

    def one(number):
        group = v2_only.create(f"test-many-{os.getpid()}")
        gate.close(group, numbers, [0])
        if number % 2:
            gate.open(group)
        v2_only.remove(group)
        gate.open(group)

    one(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        one(number)
    assert len(os.listdir("/proc/self/fd")) == before
    assert gate._plans == {} and gate._held_paths == {}


def test_one_taken_away_by_another_manager_is_seen(v2_only, group_v2, program, numbers):
    gate = Gate(v2_only, lambda: program)
    gate.close(group_v2, numbers, [0])
    _detach(v2_only, group_v2.unified, program)
    assert not gate.is_closed(group_v2)
    gate.close(group_v2, numbers, [0])
    assert gate.is_closed(group_v2)


def test_a_cgroup_that_is_gone(v2_only, program, numbers):
    group = v2_only.create(f"test-gone-{os.getpid()}")
    v2_only.remove(group)
    gate = Gate(v2_only, lambda: program)
    gate.open(group)
    assert not gate.is_closed(group)
    with pytest.raises(NotFound):
        gate.close(group, numbers, [0])


def test_another_one_under_the_same_path(v2_only, program, numbers):
    """The container ended and another was made in its place: its gate is not ours to set."""
    name = f"test-again-{os.getpid()}"
    old = v2_only.create(name)
    v2_only.remove(old)
    new = v2_only.create(name)
    try:
        with pytest.raises(NotFound):
            Gate(v2_only, lambda: program).close(old, numbers, [0])
        assert _ids(v2_only, new) == []
    finally:
        v2_only.remove(new)


def test_guarding_and_all_places(v2_only, group_v2, program, numbers, dev):
    tree = v2_only.unified
    for name in ("kube-a", "kube-b", "other"):
        tree.make(f"{group_v2.unified}/{name}")
    gate = Gate(v2_only, lambda: program)
    guarded = [f"{group_v2.unified}/kube-a", f"{group_v2.unified}/kube-b"]
    assert gate.guard([f"{group_v2.unified}/kube-*", "/no-such/*"]) == guarded
    assert [p for p in gate.everywhere() if p.startswith(group_v2.unified)] == guarded
    first = v2_only.of_path(guarded[0])
    card = (numbers.card_major, 0)
    assert gate_programs.open_in(v2_only, first, *card, dev) == errno.EPERM
    # One of them is bound, and released: the guard stays.
    gate.close(first, numbers, [0])
    gate.open(first)
    assert gate.is_closed(first)
    # One of them is bound while the guard goes: its gate stays.
    gate.close(first, numbers, [0])
    gate.unguard()
    assert [p for p in gate.everywhere() if p.startswith(group_v2.unified)] == guarded[:1]
    gate.detach(guarded[0])
    assert not [p for p in gate.everywhere() if p.startswith(group_v2.unified)]


def test_a_guard_taken_out_of_the_list_opens(v2_only, group_v2, program):
    for name in ("a", "b"):
        v2_only.unified.make(f"{group_v2.unified}/{name}")
    gate = Gate(v2_only, lambda: program)
    gate.guard([f"{group_v2.unified}/*"])
    assert gate.guard([f"{group_v2.unified}/a"]) == [f"{group_v2.unified}/a"]
    assert _ids(v2_only, v2_only.of_path(f"{group_v2.unified}/b")) == []


# v1


def test_v1_of_a_cgroup_that_allows_all(v1_only, group_v1, numbers, dev):
    gate = Gate(v1_only, lambda: -1)
    gate.close(group_v1, numbers, [1])
    answers = {
        minor: gate_programs.open_in(v1_only, group_v1, numbers.card_major, minor, dev)
        for minor in (0, 1, 31, numbers.ctl_minor, numbers.uvm_minor)
    }
    assert answers == {0: errno.EPERM, 1: errno.ENXIO, 31: errno.EPERM, 255: errno.ENXIO,
                       254: errno.ENXIO}  # fmt: skip
    assert gate_programs.open_in(v1_only, group_v1, *NULL, dev) == 0
    assert gate.is_closed(group_v1)
    gate.close(group_v1, numbers, [0])
    assert gate_programs.open_in(v1_only, group_v1, numbers.card_major, 1, dev) == errno.EPERM
    assert gate_programs.open_in(v1_only, group_v1, numbers.card_major, 0, dev) == errno.ENXIO
    gate.open(group_v1)
    for minor in (0, 1, 31, 255):
        answer = gate_programs.open_in(v1_only, group_v1, numbers.card_major, minor, dev)
        assert answer == errno.ENXIO


def _deny_all_but(tree, path, *rules):
    """What a runtime does for a container."""
    tree.deny(path, v1.Rule("a", None, None, "rwm"))
    for rule in rules:
        tree.allow(path, rule)


def _shown(tree, path):
    return sorted(str(rule) for rule in tree.rules(path))


def test_v1_of_a_cgroup_that_denies_all(v1_only, group_v1, numbers, dev):
    tree, path, major = v1_only.devices, group_v1.devices, numbers.card_major
    _deny_all_but(tree, path, v1.Rule("c", None, None, "m"), v1.Rule("c", 1, 3, "rwm"))
    gate = Gate(v1_only, lambda: -1)
    gate.close(group_v1, numbers, [2])
    assert _shown(tree, path) == sorted(
        ["c *:* m", "c 1:3 rwm", f"c {major}:2 rw", f"c {major}:255 rw", f"c {major}:254 rw"]
    )
    assert gate.is_closed(group_v1)
    assert gate_programs.open_in(v1_only, group_v1, major, 2, dev) == errno.ENXIO
    assert gate_programs.open_in(v1_only, group_v1, major, 0, dev) == errno.EPERM
    gate.open(group_v1)
    assert _shown(tree, path) == ["c *:* m", "c 1:3 rwm"]


def test_v1_opens_after_a_restart_what_an_earlier_agent_closed(v1_only, group_v1, numbers, dev):
    """Nothing remembers the cards held: all of NVIDIA's numbers are put back."""
    Gate(v1_only, lambda: -1).close(group_v1, numbers, [1])
    Gate(v1_only, lambda: -1).open(group_v1, numbers)
    for minor in (0, 1, 31, 255):
        answer = gate_programs.open_in(v1_only, group_v1, numbers.card_major, minor, dev)
        assert answer == errno.ENXIO


def test_v1_after_a_restart_who_is_released_holds_no_card(v1_only, group_v1, numbers):
    tree, path = v1_only.devices, group_v1.devices
    _deny_all_but(tree, path, v1.Rule("c", 1, 3, "rwm"))
    Gate(v1_only, lambda: -1).close(group_v1, numbers, [0])
    Gate(v1_only, lambda: -1).open(group_v1, numbers)
    assert _shown(tree, path) == ["c 1:3 rwm"]


def test_v1_takes_away_what_a_runtime_gave_too_much(v1_only, group_v1, numbers):
    tree, path, major = v1_only.devices, group_v1.devices, numbers.card_major
    _deny_all_but(tree, path, v1.Rule("c", major, None, "rwm"), v1.Rule("c", 1, 3, "rwm"))
    gate = Gate(v1_only, lambda: -1)
    gate.close(group_v1, numbers, [0])
    held = [f"c {major}:0 rw", f"c {major}:255 rw", f"c {major}:254 rw"]
    assert _shown(tree, path) == sorted(["c 1:3 rwm", *held])


def test_v1_allows_in_the_cgroups_inside_too(v1_only, group_v1, numbers, dev):
    tree, path = v1_only.devices, group_v1.devices
    _deny_all_but(tree, path, v1.Rule("c", None, None, "m"))
    tree.make(f"{path}/inner")
    Gate(v1_only, lambda: -1).close(group_v1, numbers, [0])
    inner = v1_only.of_path(f"{path}/inner")
    assert gate_programs.open_in(v1_only, inner, numbers.card_major, 0, dev) == errno.ENXIO
    assert gate_programs.open_in(v1_only, inner, numbers.card_major, 1, dev) == errno.EPERM


def test_v1_writes_nothing_when_all_is_right(v1_only, group_v1, numbers, monkeypatch):
    _deny_all_but(v1_only.devices, group_v1.devices, v1.Rule("c", None, None, "m"))
    Gate(v1_only, lambda: -1).close(group_v1, numbers, [0])
    written = []
    monkeypatch.setattr(v1.DeviceRules, "allow", lambda *a: written.append(a))
    monkeypatch.setattr(v1.DeviceRules, "deny", lambda *a: written.append(a))
    Gate(v1_only, lambda: -1).close(group_v1, numbers, [0])
    assert written == []


def test_v1_under_a_cgroup_that_denies_the_cards(v1_only, group_v1, numbers):
    tree, path = v1_only.devices, group_v1.devices
    _deny_all_but(tree, path, v1.Rule("c", 1, 3, "rwm"))
    tree.make(f"{path}/inner")
    with pytest.raises(NotCapable, match="above it denies the cards"):
        Gate(v1_only, lambda: -1).close(v1_only.of_path(f"{path}/inner"), numbers, [0])


def test_v1_with_a_rule_for_every_device(v1_only, group_v1, numbers):
    tree, path = v1_only.devices, group_v1.devices
    _deny_all_but(tree, path, v1.Rule("c", None, None, "rwm"))
    with pytest.raises(NotCapable, match=r"the rule c \*:\* rwm allows every device"):
        Gate(v1_only, lambda: -1).close(group_v1, numbers, [0])


def test_v1_with_no_unified_hierarchy_has_no_guard(v1_only):
    gate = Gate(v1_only, lambda: -1)
    assert gate.guard(["/docker"]) == []
    assert gate.everywhere() == []


# Both


def test_hybrid_closes_both(unified, devices_v1, group, program, numbers):
    gate = Gate(unified, lambda: program)
    gate.close(group, numbers, [0])
    assert gate.is_closed(group)
    assert _ids(unified, group) == [_id(program)]
    gate.open(group)
    assert _ids(unified, group) == []
