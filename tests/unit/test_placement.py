"""Which card, which number, and what is said when there is none. Scores are worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import placement
from mgpu.errors import MgpuError, NoRoom, NotFound, RuleBroken
from mgpu.model import MIB, Cgroup, Container, Device, Instance, Policy, Request
from mgpu.placement import CardLoad, Placement, Strategy
from mgpu.rules import CardShare

PAGE = (Path(__file__).parents[2] / "docs/rules.md").read_text(encoding="utf-8")
FIXED, NATIVE = Policy.FIXED_SHARE, Policy.NATIVE_BURST_SHARE
BINPACK, SPREAD = Strategy.BINPACK, Strategy.SPREAD


def card(index, weight=0, memory_mib=0, total_mib=16384, policy=FIXED, ids=(), **more):
    """A card with ``weight`` and memory given out to online containers."""
    device = Device(index, f"GPU-{index}", "card", index, total_mib * MIB)
    return CardLoad(
        device,
        policy,
        weight_online=weight,
        memory_bytes=memory_mib * MIB,
        instance_ids=frozenset(ids),
        **more,
    )


def chosen(request, cards, strategy=BINPACK):
    return [(p.device_index, p.instance_id) for p in placement.choose(request, cards, strategy)]


# Core 30, 4096 MiB on 16384 MiB, empty: free ratios 0.7 and 0.75.
# (20 * 0.49 + 80 * 0.5625) / 100 = (9.8 + 45) / 100 = 0.548
# The same with core 20 and 8192 MiB given out: 0.5 and 0.25: (20 * 0.25 + 80 * 0.0625) / 100 = 0.1
# The same on 65536 MiB, empty: 0.7 and 0.9375: (9.8 + 80 * 0.87890625) / 100 = 0.801125
@pytest.mark.parametrize(
    ("load", "score"),
    [(card(0), 0.548), (card(0, 20, 8192), 0.1), (card(0, total_mib=65536), 0.801125)],
)
def test_score_of_a_card(load, score):
    assert placement.card_score(load, CardShare(1, 30, 4096), True) == pytest.approx(score)


def test_score_of_full_empty_and_worthless():
    assert placement.free_score(100, 100, 7, 7) == 1.0
    assert placement.free_score(0, 100, 0, 7) == 0.0
    assert placement.free_score(100, 100, 0, 0) == pytest.approx(0.2)
    assert placement.free_score(0, 100, 1, 2) == pytest.approx(0.8 * 0.25)


def test_memory_weighs_four_times_core():
    # Card 0: core 50 used, no memory. Card 1: no core used, half the memory.
    # With core 10, 1024 MiB (of 16384) on it: 0: 0.4, 0.9375 -> 0.032 + 0.703125 = 0.735125
    #                                          1: 0.9, 0.4375 -> 0.162 + 0.153125 = 0.315125
    cards = [card(0, 50, 0), card(1, 0, 8192)]
    assert chosen(Request(10, 1024), cards, BINPACK) == [(1, 0)]
    assert chosen(Request(10, 1024), cards, SPREAD) == [(0, 0)]


def test_of_two_empty_cards_binpack_takes_the_one_it_fills_more():
    cards = [card(0, total_mib=143771), card(1, total_mib=23028)]
    assert chosen(Request(30, 4096), cards, BINPACK) == [(1, 0)]
    assert chosen(Request(30, 4096), cards, SPREAD) == [(0, 0)]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_equal_scores_go_to_the_lower_device(strategy):
    cards = [card(2), card(0), card(1)]
    assert chosen(Request(30, 4096), cards, strategy) == [(0, 0)]


def test_lowest_free_instance_number():
    assert chosen(Request(1, 256), [card(0, ids=(0, 1, 3))]) == [(0, 2)]
    assert chosen(Request(1, 256), [card(0, ids=range(15))]) == [(0, 15)]


def test_a_named_device_is_taken_though_another_scores_better():
    cards = [card(0), card(1, 50, 8192)]
    assert chosen(Request(30, 4096, device_index=0), cards, BINPACK) == [(0, 0)]


def test_unknown_device():
    with pytest.raises(NotFound) as caught:
        placement.choose(Request(30, 4096, device_index=7), [card(0), card(1)], BINPACK)
    assert str(caught.value) == "device 7: no such device on this node; choose one of 0, 1"


def test_no_device_at_all():
    with pytest.raises(NoRoom):
        placement.choose(Request(30, 4096), [], BINPACK)
    with pytest.raises(NotFound):
        placement.choose(Request(30, 4096, device_index=0), [], BINPACK)


def test_exactly_what_is_left_is_given():
    load = card(0, 70, 12288)
    (given_out,) = placement.choose(Request(30, 4096), [load], BINPACK)
    assert given_out == Placement("GPU-0", 0, 0, 30, 4096 * MIB)
    for one_more in (Request(31, 4096), Request(30, 4097)):
        with pytest.raises(NoRoom):
            placement.choose(one_more, [load], BINPACK)


def test_offline_weight_is_a_pool_of_its_own_and_memory_is_not():
    load = replace(card(0, 100, 8192), weight_offline=40)
    assert load.free_weight(True) == 0
    assert load.free_weight(False) == 60
    assert chosen(Request(60, 4096, online=False), [load]) == [(0, 0)]
    for refused in (
        Request(61, 4096, online=False),
        Request(1, 4096, online=True),
        Request(60, 8193, online=False),
    ):
        with pytest.raises(NoRoom):
            placement.choose(refused, [load], BINPACK)


def test_what_the_driver_and_the_reserve_keep_is_not_given_out():
    device = Device(0, "GPU-0", "card", 0, 16384 * MIB, vmem_reserved_bytes=500 * MIB + 1)
    load = CardLoad(device, FIXED, reserve_bytes=100 * MIB)
    assert load.usable_bytes == 15783 * MIB  # 16384 - 500 - 100, and the odd byte's MiB
    assert chosen(Request(99, 15783), [load]) == [(0, 0)]
    with pytest.raises(NoRoom):
        placement.choose(Request(99, 15784), [load], BINPACK)
    (whole,) = placement.choose(Request(100), [load], BINPACK)
    assert (whole.vmem_limit_bytes, whole.whole_card) == (15783 * MIB, True)


def test_a_card_smaller_than_its_reserve_gives_nothing():
    load = card(0, total_mib=100, reserve_bytes=200 * MIB)
    assert (load.usable_bytes, load.free_bytes) == (0, 0)
    for request in (Request(30, 256), Request(100)):
        with pytest.raises(NoRoom):
            placement.choose(request, [load], BINPACK)


def test_more_given_out_than_there_is_counts_as_nothing_free():
    load = card(0, 120, 20000)
    assert (load.free_weight(True), load.free_bytes) == (0, 0)


def test_a_refusal_says_of_which_pool_it_speaks():
    load = replace(card(0, 10), weight_offline=90)
    with pytest.raises(NoRoom) as caught:
        placement.choose(Request(20, 4096, online=False), [load], BINPACK)
    assert str(caught.value).startswith(
        "core 20, memory 4096 MiB, offline: no card has room: device 0 has core 10 and 16384 MiB"
    )


def test_unhealthy_cards_are_passed_over():
    cards = [card(0, healthy=False), card(1)]
    assert chosen(Request(30, 4096), cards) == [(1, 0)]
    with pytest.raises(NoRoom) as caught:
        placement.choose(Request(30, 4096, device_index=0), cards, BINPACK)
    assert "device 0 is out of service" in str(caught.value)


def test_several_cards_are_distinct_and_come_by_index():
    cards = [card(i, policy=NATIVE, ids=(0,), weight=w) for i, w in enumerate((0, 50, 10, 20))]
    assert chosen(Request(60, 8192, cards=2), cards, SPREAD) == [(0, 1), (2, 1)]
    assert chosen(Request(60, 8192, cards=2), cards, BINPACK) == [(1, 1), (3, 1)]
    split = placement.choose(Request(60, 8192, cards=2), cards, BINPACK)
    assert {(p.compute_weight, p.vmem_limit_bytes) for p in split} == {(30, 4096 * MIB)}


def test_several_cards_only_under_native_burst_share():
    with pytest.raises(RuleBroken) as caught:
        placement.choose(Request(60, 8192, cards=2), [card(0), card(1)], BINPACK)
    assert str(caught.value) in PAGE
    with pytest.raises(RuleBroken) as caught:
        placement.choose(Request(60, 8192, cards=2), [card(0), card(1, policy=NATIVE)], BINPACK)
    assert "on each, and device 0 is under another policy" in str(caught.value)
    cards = [card(0), card(1, policy=NATIVE), card(2, policy=NATIVE)]
    assert chosen(Request(60, 8192, cards=2), cards) == [(1, 0), (2, 0)]


def test_more_cards_than_the_node_has_is_a_matter_of_room():
    with pytest.raises(NoRoom):
        placement.choose(Request(60, 8192, cards=2), [card(0)], BINPACK)


def test_whole_cards_need_no_policy_and_nobody_else():
    cards = [card(0, 1, 256, ids=(0,)), card(1), card(2)]
    assert chosen(Request(200), cards) == [(1, 0), (2, 0)]
    with pytest.raises(NoRoom):
        placement.choose(Request(300), cards, BINPACK)


def test_a_whole_card_shuts_out_everybody():
    (whole,) = placement.choose(Request(100, online=False), [card(0)], BINPACK)
    load = replace(
        card(0),
        weight_offline=whole.compute_weight,
        memory_bytes=whole.vmem_limit_bytes,
        instance_ids=frozenset({0}),
    )
    for request in (Request(1, 256), Request(1, 256, online=False), Request(100)):
        with pytest.raises(NoRoom):
            placement.choose(request, [load], BINPACK)


def test_seventeenth_instance():
    full = card(0, 16, 16 * 256, ids=range(16))
    with pytest.raises(NoRoom) as caught:
        placement.choose(Request(1, 256), [full], BINPACK)
    assert "device 0 has all of its 16 instances in use" in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "cards"),
    [
        (
            Request(50, 20480),
            [card(0, 60, 4096, ids=(0,)), card(1, ids=range(16)), card(2, healthy=False)],
        ),
        (Request(100), [card(0, ids=(0, 1))]),
        (Request(300), [card(0, ids=(0, 1)), card(1)]),
    ],
)
def test_no_room_says_what_is_free(request_, cards):
    with pytest.raises(NoRoom) as caught:
        placement.choose(request_, cards, BINPACK)
    assert str(caught.value) in PAGE


def test_no_room_on_many_cards_stays_short():
    with pytest.raises(NoRoom) as caught:
        placement.choose(Request(50, 20480), [card(i) for i in range(16)], BINPACK)
    assert "device 7 has core 100 and 16384 MiB free, and 8 more; release" in str(caught.value)
    assert len(str(caught.value)) < 600


def held(weight, memory_mib, cards=1, whole=False, online=True):
    return Container(
        container_id="7b0622290a6e" + "0" * 52,
        cgroup=Cgroup(1, unified="/a"),
        instances=tuple(
            Instance(9 + i, f"GPU-{i}", i, 3, weight, memory_mib * MIB, whole) for i in range(cards)
        ),
        online=online,
    )


def test_resize_counts_what_the_container_holds_as_free():
    load = card(0, 90, 16384 - 2048, ids=(0, 3))  # others: core 60, 10240 MiB
    container = held(30, 4096)
    grown = placement.resize(container, Request(40, 6144), [load])
    (instance,) = grown.instances
    assert instance == Instance(9, "GPU-0", 0, 3, 40, 6144 * MIB)
    for too_much in (Request(41, 6144), Request(40, 6145), Request(100)):
        with pytest.raises(NoRoom):
            placement.resize(container, too_much, [load])


def test_resize_refusal_is_on_the_page():
    with pytest.raises(NoRoom) as caught:
        placement.resize(held(30, 4096), Request(90, 4096), [card(0, 90, 4096, ids=(0, 3))])
    assert str(caught.value) in PAGE


def test_resize_can_always_shrink():
    overbooked = card(0, 120, 20000, ids=(0, 3))
    shrunk = placement.resize(held(60, 10000), Request(50, 9000), [overbooked])
    assert shrunk.instances[0].compute_weight == 50
    placement.resize(held(60, 10000), Request(60, 10000), [overbooked])
    with pytest.raises(NoRoom):
        placement.resize(held(60, 10000), Request(61, 10000), [overbooked])


def test_resize_to_the_other_pool():
    load = replace(card(0, 80, 8192, ids=(0, 3)), weight_offline=70)
    container = held(30, 4096)
    offline = placement.resize(container, Request(30, 4096, online=False), [load])
    assert offline.online is False
    with pytest.raises(NoRoom):
        placement.resize(container, Request(31, 4096, online=False), [load])


def test_resize_to_and_from_a_whole_card():
    alone = card(0, 30, 4096, ids=(3,))
    whole = placement.resize(held(30, 4096), Request(100), [alone])
    assert whole.instances[0].whole_card is True
    assert whole.instances[0].vmem_limit_bytes == 16384 * MIB
    full = card(0, 100, 16384, ids=(3,))
    back = placement.resize(held(100, 16384, whole=True), Request(30, 4096), [full])
    assert back.instances[0] == Instance(9, "GPU-0", 0, 3, 30, 4096 * MIB)


def test_resize_keeps_the_number_of_cards():
    with pytest.raises(RuleBroken):
        placement.resize(held(30, 4096), Request(60, 8192, cards=2), [card(0), card(1)])
    with pytest.raises(RuleBroken):
        placement.resize(held(30, 4096, cards=2), Request(30, 4096), [card(0), card(1)])


def test_resize_over_several_cards_takes_all_or_none():
    cards = [card(0, 30, 4096, policy=NATIVE, ids=(3,)), card(1, 95, 4096, policy=NATIVE, ids=(3,))]
    with pytest.raises(NoRoom) as caught:
        placement.resize(held(30, 4096, cards=2), Request(80, 8192, cards=2), cards)
    assert "device 1 has core 35" in str(caught.value)


def test_resize_of_whole_cards_to_a_share_needs_the_policy():
    cards = [card(0, 100, 16384, ids=(3,)), card(1, 100, 16384, ids=(3,))]
    with pytest.raises(RuleBroken):
        placement.resize(held(100, 16384, 2, whole=True), Request(60, 8192, cards=2), cards)


def test_resize_when_the_device_is_gone():
    with pytest.raises(NotFound):
        placement.resize(held(30, 4096), Request(40, 4096), [card(5)])


def test_loads_from_containers():
    devices = [Device(i, f"GPU-{i}", "card", i, 16384 * MIB) for i in range(3)]
    containers = [
        held(30, 4096, cards=2),
        replace(
            held(20, 1024, online=False),
            instances=(Instance(20, "GPU-0", 0, 0, 20, 1024 * MIB),),
        ),
        replace(held(9, 256), instances=(Instance(21, "GPU-gone", 5, 0, 9, 256 * MIB),)),
    ]
    first, second, third = placement.loads(
        devices, containers, {"GPU-2": NATIVE}, FIXED, {"GPU-1"}, MIB
    )
    assert first == CardLoad(
        devices[0], NATIVE, 30, 20, 5120 * MIB, frozenset({0, 3}), True, reserve_bytes=MIB
    )
    assert second == CardLoad(
        devices[1], NATIVE, 30, 0, 4096 * MIB, frozenset({3}), False, reserve_bytes=MIB
    )
    assert third == CardLoad(devices[2], NATIVE, reserve_bytes=MIB)
    assert placement.loads(devices, [], {}, FIXED)[0].policy is FIXED


# Node of two cards of 16384 MiB, one holding core 40 and 8192 MiB; asked core 30, 4096 MiB.
# Free after: core 200 - 40 - 30 = 130 of 200 = 0.65, memory 32768 - 8192 - 4096 = 20480: 0.625
# (20 * 0.4225 + 80 * 0.390625) / 100 = 0.0845 + 0.3125 = 0.397
def test_score_of_a_node():
    cards = [card(0, 40, 8192), card(1)]
    assert placement.node_score(Request(30, 4096), cards, SPREAD) == pytest.approx(39.7)
    assert placement.node_score(Request(30, 4096), cards, BINPACK) == pytest.approx(60.3)


def test_a_node_without_room_has_no_score_and_a_sick_card_does_not_count():
    assert placement.node_score(Request(30, 20000), [card(0)], SPREAD) is None
    assert placement.node_score(Request(30, 4096), [], SPREAD) is None
    assert placement.node_score(Request(60, 8192, cards=2), [card(0), card(1)], SPREAD) is None
    with pytest.raises(RuleBroken):
        placement.node_score(Request(101, 4096), [card(0)], SPREAD)
    with_sick = [card(0), card(1, healthy=False)]
    assert placement.node_score(Request(30, 4096), with_sick, SPREAD) == pytest.approx(54.8)


def test_spread_prefers_the_emptier_node_and_binpack_the_fuller():
    empty, half = [card(0)], [card(0, 50, 8192)]
    asked = Request(30, 4096)
    assert placement.node_score(asked, empty, SPREAD) > placement.node_score(asked, half, SPREAD)
    assert placement.node_score(asked, half, BINPACK) > placement.node_score(asked, empty, BINPACK)


REQUESTS = st.builds(
    Request,
    core=st.integers(1, 300),
    memory_mib=st.one_of(st.none(), st.integers(1, 20000)),
    cards=st.integers(1, 3),
    online=st.booleans(),
)


@given(st.lists(REQUESTS, max_size=25), st.sampled_from(list(Strategy)), st.data())
def test_no_sequence_of_requests_and_releases_overbooks_a_card(requests, strategy, data):
    devices = [Device(i, f"GPU-{i}", "card", i, (i + 1) * 8192 * MIB + 5) for i in range(3)]
    policies = {"GPU-0": NATIVE, "GPU-1": NATIVE}
    containers = []
    for number, request in enumerate(requests):
        cards = placement.loads(devices, containers, policies, FIXED)
        try:
            given_out = placement.choose(request, cards, strategy)
        except MgpuError:
            if containers and data.draw(st.booleans()):
                containers.pop(data.draw(st.integers(0, len(containers) - 1)))
            continue
        instances = tuple(
            Instance(
                number,
                p.device_uuid,
                p.device_index,
                p.instance_id,
                p.compute_weight,
                p.vmem_limit_bytes,
                p.whole_card,
            )
            for p in given_out
        )
        assert len({p.device_uuid for p in given_out}) == len(given_out)
        containers.append(
            Container(str(number), Cgroup(number, unified="/a"), instances, online=request.online)
        )
        for load in placement.loads(devices, containers, policies, FIXED):
            assert load.weight_online <= 100 and load.weight_offline <= 100
            assert load.memory_bytes <= load.usable_bytes
            on_card = [
                i for c in containers for i in c.instances if i.device_uuid == load.device.uuid
            ]
            assert len(load.instance_ids) == len(on_card) <= 16
            assert not any(i.whole_card for i in on_card) or len(on_card) == 1
