"""Every rule of docs/rules.md, run from its tables; and properties that no table can list."""

import ast
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu import rules
from mgpu.errors import BadInput, Conflict, MgpuError, RuleBroken
from mgpu.model import MIB, Cgroup, Container, Device, Instance, Policy, Request

PAGE = (Path(__file__).parents[2] / "docs/rules.md").read_text(encoding="utf-8")
PARSERS = {
    "--core": ("core", rules.parse_core),
    "--memory": ("memory_mib", rules.parse_memory_mib),
    "--cards": ("cards", rules.parse_cards),
    "--device": ("device_index", rules.parse_device_index),
    "--containers-in-pod": ("containers_in_pod", int),
}


def table(heading):
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows, heading
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def request(options):
    words = options.strip("`").split()
    fields = {}
    while words:
        word = words.pop(0)
        if word in ("--privileged", "--rdma"):
            fields[word[2:]] = True
        else:
            name, parse = PARSERS[word]
            fields[name] = parse(words.pop(0))
    return Request(**fields)


GIVEN = table("What a request comes to")
REFUSED = table("Refused: `rule-broken`")
WARNED = table("Taken with a warning")


@pytest.mark.parametrize(("asked", "cards", "weight", "limit"), GIVEN)
def test_what_a_request_comes_to(asked, cards, weight, limit):
    rules.check(request(asked))
    share = rules.per_card(request(asked))
    memory = "the whole card" if share.whole_card else f"{share.memory_mib} MiB"
    assert (str(share.cards), str(share.compute_weight), memory) == (cards, weight, limit)


@pytest.mark.parametrize(("rule", "asked", "answer"), REFUSED)
def test_refusal(rule, asked, answer):
    with pytest.raises(RuleBroken) as caught:
        rules.check(request(asked))
    assert str(caught.value) == answer


def test_core_starts_at_1():
    with pytest.raises(RuleBroken, match="core 0: core starts at 1; ask for core 1 to 99, or 100"):
        rules.check(Request(core=0, memory_mib=4096))


@pytest.mark.parametrize(("asked", "warning"), WARNED)
def test_warning(asked, warning):
    assert rules.check(request(asked)) == [warning]


@pytest.mark.parametrize(
    "asked", ["--core 5 --memory 1024", "--core 100", "--core 95 --memory 1024"]
)
def test_no_warning(asked):
    assert rules.check(request(asked)) == []


def test_several_warnings_come_together():
    found = rules.check(Request(core=3, memory_mib=300, containers_in_pod=7))
    assert [warning.split(":")[0] for warning in found] == [
        "core 3 a card",
        "memory 300 MiB",
        "7 containers in the pod",
    ]


def test_the_table_meets_every_refusal_in_the_code(monkeypatch):
    made_at = set()

    class Recorded(RuleBroken):
        def __init__(self, *words):
            made_at.add(sys._getframe(1).f_code.co_name)
            super().__init__(*words)

    monkeypatch.setattr(rules, "RuleBroken", Recorded)
    for _, asked, _ in REFUSED:
        with pytest.raises(RuleBroken):
            rules.check(request(asked))
    elsewhere = {"check_policies", "same_value"}  # below, and in test_placement.py
    assert made_at | elsewhere == _functions_that_refuse()


def _functions_that_refuse():
    tree = ast.parse(inspect.getsource(rules))
    return {
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RuleBroken"
    }


def test_requests_equal_limits():
    assert rules.same_value("core", 30, 30) == 30
    with pytest.raises(RuleBroken) as caught:
        rules.same_value("core", 30, 40)
    assert str(caught.value) in PAGE


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse, value)
        for parse in (rules.parse_core, rules.parse_memory_mib, rules.parse_cards)
        for value in ("0", "-1", "30.5", "1e3", "", None, True, 10**30, "٣", 0, -5, 2.0)
    ],
)
def test_parsers_refuse(parse, value):
    with pytest.raises(BadInput) as caught:
        parse(value)
    assert len(str(caught.value)) < 150


def test_the_page_quotes_a_parser():
    with pytest.raises(BadInput) as caught:
        rules.parse_memory_mib("4Gi")
    assert str(caught.value) in PAGE


def test_device_zero_is_a_device():
    assert rules.parse_device_index("0") == 0
    with pytest.raises(BadInput):
        rules.parse_device_index("-1")
    with pytest.raises(BadInput):
        rules.parse_device_index("mgpu0")


@pytest.mark.parametrize("policy", list(Policy))
def test_policy_by_number_and_by_name(policy):
    for value in (policy.label, int(policy), str(int(policy))):
        assert rules.parse_policy(value) is policy


@pytest.mark.parametrize(
    "value", ["3", 3, -1, True, False, 1.0, "", None, "fixed", [0], "FIXED-SHARE"]
)
def test_unknown_policy(value):
    with pytest.raises(BadInput) as caught:
        rules.parse_policy(value)
    assert "0 fixed-share, 1 guaranteed-burst-share, 2 native-burst-share" in str(caught.value)


DEVICES = [Device(index, f"GPU-{index}", "card", index, 16384 * MIB) for index in range(3)]


def container(cards, weight, limit_mib, whole=False):
    return Container(
        container_id="7b0622290a6e" + "0" * 52,
        cgroup=Cgroup(1, unified="/a"),
        instances=tuple(
            Instance(n + 1, f"GPU-{n}", n, 0, weight, limit_mib * MIB, whole) for n in range(cards)
        ),
    )


def test_a_card_in_a_share_over_several_keeps_its_policy():
    split = container(2, 30, 4096)
    for device in DEVICES[:2]:
        rules.check_policy_change(device, Policy.NATIVE_BURST_SHARE, [split])
        for policy in (Policy.FIXED_SHARE, Policy.GUARANTEED_BURST_SHARE):
            with pytest.raises(Conflict):
                rules.check_policy_change(device, policy, [split])
    rules.check_policy_change(DEVICES[2], Policy.FIXED_SHARE, [split])
    with pytest.raises(Conflict) as caught:
        rules.check_policy_change(DEVICES[0], Policy.FIXED_SHARE, [split])
    assert str(caught.value) in PAGE


def test_a_new_default_does_not_take_the_policy_from_a_share_over_several():
    split, given = [container(2, 30, 4096)], {"GPU-2": Policy.GUARANTEED_BURST_SHARE}
    under = [rules.policy_of(f"GPU-{n}", given, Policy.FIXED_SHARE, split) for n in range(4)]
    assert under == [
        Policy.NATIVE_BURST_SHARE,
        Policy.NATIVE_BURST_SHARE,
        Policy.GUARANTEED_BURST_SHARE,
        Policy.FIXED_SHARE,
    ]
    whole = [container(2, 100, 16384, whole=True)]
    assert rules.policy_of("GPU-0", {}, Policy.FIXED_SHARE, whole) is Policy.FIXED_SHARE


def test_other_containers_do_not_bind_a_policy():
    rules.check_policy_change(DEVICES[0], Policy.FIXED_SHARE, [container(1, 30, 4096)])
    rules.check_policy_change(
        DEVICES[0], Policy.FIXED_SHARE, [container(2, 100, 16384, whole=True)]
    )


REQUESTS = st.builds(
    Request,
    core=st.integers(1, 1000),
    memory_mib=st.one_of(st.none(), st.integers(1, 10**6)),
    cards=st.integers(1, 10),
    device_index=st.one_of(st.none(), st.integers(0, 3)),
)


@given(REQUESTS)
def test_what_passes_obeys_every_bound(asked):
    try:
        rules.check(asked)
    except RuleBroken as error:
        assert len(str(error)) < 300
        return
    share = rules.per_card(asked)
    assert 1 <= share.cards <= 8
    assert share.cards * share.compute_weight == asked.core
    assert 1 <= share.compute_weight <= 100
    if share.whole_card:
        assert asked.memory_mib is None and asked.core % 100 == 0
    else:
        assert share.cards == asked.cards
        assert share.cards * share.memory_mib == asked.memory_mib
        assert share.memory_mib >= (256 if share.cards == 1 else 1024)
        assert share.cards > 1 or share.compute_weight < 100
        assert share.cards == 1 or share.memory_mib <= 81920
    assert asked.device_index is None or share.cards == 1


@given(REQUESTS)
def test_the_remedy_of_an_uneven_split_holds(asked):
    """Whoever follows "ask for N or M" is not refused for the same reason again."""
    try:
        rules.check(asked)
    except MgpuError as error:
        match = re.match(r"ask for (core|memory) (\d+)( or (\d+))?$", error.remedy)
        if match is None or "does not divide" not in error.reason:
            return
        for number in filter(None, (match.group(2), match.group(4))):
            name = {"core": "core", "memory": "memory_mib"}[match.group(1)]
            try:
                rules.check(replace(asked, **{name: int(number)}))
            except RuleBroken as again:
                assert again.reason != error.reason


@given(REQUESTS)
def test_a_container_asks_for_what_it_holds(asked):
    try:
        share = rules.per_card(asked)
    except RuleBroken:
        return
    limit_mib = share.memory_mib or 16384
    held = container(share.cards, share.compute_weight, limit_mib, share.whole_card)
    assert rules.per_card(rules.request_of(held)) == share
