"""What may be asked for: every rule on a request by itself, each with a message of its own.

Pure. Rules that need to know what the cards hold already (total weight, memory, instances, the
device's policy) are in placement.py. docs/rules.md explains each rule; its test holds the two
together.
"""

from dataclasses import dataclass
from typing import Iterable, List, Mapping, Optional, TypeVar

from mgpu.errors import BadInput, Conflict, RuleBroken
from mgpu.model import MAX_CARDS_PER_CONTAINER, MIB, Container, Device, Policy, Request
from mgpu.units import shown, whole_number

WHOLE_CARD_CORE = 100
LEAST_MEMORY_MIB = 256
LEAST_MEMORY_MIB_OF_SEVERAL = 1024
MOST_MEMORY_MIB_OF_SEVERAL = 81920
RECOMMENDED_CORE_STEP = 5
RECOMMENDED_MEMORY_MIB = 1024
RECOMMENDED_CONTAINERS_IN_POD = 5

_FOR_SEVERAL = Policy.NATIVE_BURST_SHARE

T = TypeVar("T")


@dataclass(frozen=True)
class CardShare:
    """What a request comes to on each of its ``cards``; ``memory_mib`` None: the whole card."""

    cards: int
    compute_weight: int
    memory_mib: Optional[int]

    @property
    def whole_card(self) -> bool:
        return self.memory_mib is None

    @property
    def needs_native_burst(self) -> bool:
        """A share over several cards; whole cards have nobody to share with."""
        return self.cards > 1 and not self.whole_card


def parse_core(value: object) -> int:
    """Percent of device time, over all cards asked for."""
    return whole_number(value, "core", "write whole percent, such as 30", least=1)


def parse_memory_mib(value: object) -> int:
    """Device memory in MiB, over all cards asked for."""
    return whole_number(value, "memory", "write whole MiB without a unit, such as 4096", least=1)


def parse_cards(value: object) -> int:
    """How many cards to spread the request over."""
    return whole_number(value, "cards", f"write 1 to {MAX_CARDS_PER_CONTAINER}", least=1)


def parse_device_index(value: object) -> int:
    """A device as NVML numbers it."""
    return whole_number(value, "device", "write a device_id of 'mgpu-cli device info -a'")


def parse_policy(value: object) -> Policy:
    """A compute_policy by number (0, 1, 2) or by name (``fixed-share``)."""
    for policy in Policy:
        if value in (policy.label, str(policy.value)) or (
            type(value) is int and value == policy.value  # not a bool, not 1.0
        ):
            return policy
    known = ", ".join(f"{policy.value} {policy.label}" for policy in Policy)
    raise BadInput(f"policy {shown(value)}", "no such compute_policy", f"choose one of {known}")


def same_value(name: str, requested: T, limit: T) -> T:
    """The one value of a resource whose requests and limits must agree (Kubernetes has both)."""
    if requested != limit:
        raise RuleBroken(
            f"{name} requests {shown(requested)}, limits {shown(limit)}",
            "requests must equal limits: a share of a card is not overcommitted",
            "give both the same value",
        )
    return limit


def check(request: Request) -> List[str]:
    """Raises RuleBroken for the first rule that ``request`` breaks; else its warnings."""
    _check_container(request)
    share = per_card(request)
    return _warnings(request, share)


def per_card(request: Request) -> CardShare:
    """The even split of ``request`` over its cards. Raises RuleBroken where there is none."""
    if request.core < 1:
        raise RuleBroken(f"core {request.core}", "core starts at 1", "ask for core 1 to 99, or 100")
    if not 1 <= request.cards <= MAX_CARDS_PER_CONTAINER:
        raise RuleBroken(
            f"cards {request.cards}",
            f"a container holds 1 to {MAX_CARDS_PER_CONTAINER} cards",
            f"ask for 1 to {MAX_CARDS_PER_CONTAINER}",
        )
    if request.memory_mib is None:
        return _whole_cards(request)
    if request.cards == 1:
        return _one_card(request.core, request.memory_mib)
    return _several_cards(request.core, request.memory_mib, request)


def check_policies(request: Request, policies: Mapping[int, Policy]) -> None:
    """Raises RuleBroken when too few devices (by index) may hold a share over several cards."""
    share = per_card(request)
    if not share.needs_native_burst:
        return
    others = [index for index, policy in policies.items() if policy is not _FOR_SEVERAL]
    if others and len(policies) - len(others) < share.cards:
        names = ", ".join(str(index) for index in sorted(others))
        raise RuleBroken(
            f"cards {share.cards}",
            f"a share over several cards needs {_FOR_SEVERAL.label} on each, "
            f"and device{'s' if len(others) > 1 else ''} {names} "
            f"{'are' if len(others) > 1 else 'is'} under another policy",
            f"set it, such as 'mgpu-cli policy {min(others)} {_FOR_SEVERAL.label}', "
            "or ask for one card",
        )


def check_policy_change(device: Device, policy: Policy, containers: Iterable[Container]) -> None:
    """Raises Conflict when ``device`` holds a share over several cards: those need native-burst."""
    split = _split_share_on(device.uuid, containers)
    if split is not None and policy is not _FOR_SEVERAL:
        raise Conflict(
            f"policy {policy.label} for device {device.index}",
            f"container {split.short_id} holds a share over several cards there, "
            f"which needs {_FOR_SEVERAL.label}",
            f"release it first: 'mgpu-cli release {split.short_id}'",
        )


def policy_of(
    device_uuid: str,
    policies: Mapping[str, Policy],
    default: Policy,
    containers: Iterable[Container],
) -> Policy:
    """The policy a device is under: the one it was given, or else ``default`` (agent.conf's).

    While it holds a share over several cards that is native-burst-share: a new default must not do
    what check_policy_change() refuses.
    """
    if _split_share_on(device_uuid, containers) is not None:
        return _FOR_SEVERAL
    return policies.get(device_uuid, default)


def request_of(container: Container) -> Request:
    """The request that would give what ``container`` holds now: the base for changing a part."""
    held = container.instances
    whole = held[0].whole_card
    return Request(
        core=sum(instance.compute_weight for instance in held),
        memory_mib=None if whole else sum(i.vmem_limit_bytes for i in held) // MIB,
        cards=len(held),
        online=container.online,
        enforcer=container.enforcer,
    )


def describe(request: Request) -> str:
    """The request in the words of its options, for messages."""
    parts = [f"core {request.core}"]
    if request.memory_mib is not None:
        parts.append(f"memory {request.memory_mib} MiB")
    if request.cards > 1:
        parts.append(f"cards {request.cards}")
    if request.device_index is not None:
        parts.append(f"device {request.device_index}")
    if not request.online:
        parts.append("offline")
    return ", ".join(parts)


def _split_share_on(device_uuid: str, containers: Iterable[Container]) -> Optional[Container]:
    """A container that holds parts of several cards, one of them this."""
    for container in containers:
        held = container.instances
        split = len(held) > 1 and not held[0].whole_card
        if split and any(instance.device_uuid == device_uuid for instance in held):
            return container
    return None


def _check_container(request: Request) -> None:
    if request.privileged:
        raise RuleBroken(
            "privileged container",
            "it reaches every device whatever its cgroup says, so no share would hold",
            "run it unprivileged",
        )
    if request.rdma:
        raise RuleBroken(
            "container with RDMA devices",
            "peer access over RDMA goes past the card's share",
            "take the RDMA devices away, or give it its cards without mgpu",
        )


def _whole_cards(request: Request) -> CardShare:
    core, cards = request.core, request.cards
    if core % WHOLE_CARD_CORE or core < WHOLE_CARD_CORE:
        raise (
            _core_form(request)
            if core > WHOLE_CARD_CORE
            else RuleBroken(
                describe(request),
                "a part of a card needs memory as well as core",
                f"add memory, at least {LEAST_MEMORY_MIB} MiB, or ask for core 100, a whole card",
            )
        )
    count = core // WHOLE_CARD_CORE
    if count > MAX_CARDS_PER_CONTAINER:
        raise RuleBroken(
            describe(request),
            f"that is {count} whole cards, and a container holds at most {MAX_CARDS_PER_CONTAINER}",
            f"ask for core 100 to {MAX_CARDS_PER_CONTAINER * WHOLE_CARD_CORE}",
        )
    if cards not in (1, count):
        raise RuleBroken(
            describe(request),
            f"core {core} without memory means {count} whole card{'s' if count > 1 else ''}",
            f"ask for core {cards * WHOLE_CARD_CORE}, or add memory for a share of each card",
        )
    _check_device_named_once(request, count)
    return CardShare(count, WHOLE_CARD_CORE, None)


def _one_card(core: int, memory_mib: int) -> CardShare:
    asked = f"core {core}, memory {memory_mib} MiB"
    if core % WHOLE_CARD_CORE == 0:
        raise RuleBroken(
            asked,
            "a multiple of 100 means whole cards with all their memory",
            "leave memory out, or ask for core 1 to 99, or say over how many cards to split it",
        )
    if core > WHOLE_CARD_CORE:
        raise _core_form(Request(core, memory_mib))
    if memory_mib < LEAST_MEMORY_MIB:
        raise RuleBroken(
            asked,
            f"a share has at least {LEAST_MEMORY_MIB} MiB",
            f"ask for {LEAST_MEMORY_MIB} MiB or more",
        )
    return CardShare(1, core, memory_mib)


def _several_cards(core: int, memory_mib: int, request: Request) -> CardShare:
    cards, asked = request.cards, describe(request)
    _check_device_named_once(request, cards)
    _check_even("core", core, cards, asked)
    _check_even("memory", memory_mib, cards, asked)
    if core > cards * WHOLE_CARD_CORE:
        raise RuleBroken(
            asked,
            f"that is core {core // cards} a card, and a card has 100",
            f"ask for core {cards} to {cards * WHOLE_CARD_CORE}",
        )
    least, most = LEAST_MEMORY_MIB_OF_SEVERAL, MOST_MEMORY_MIB_OF_SEVERAL
    if not least <= memory_mib // cards <= most:
        raise RuleBroken(
            asked,
            f"that is {memory_mib // cards} MiB a card, and a share over several cards has "
            f"{least} to {most} MiB on each",
            f"ask for memory {cards * least} to {cards * most}",
        )
    return CardShare(cards, core // cards, memory_mib // cards)


def _core_form(request: Request) -> RuleBroken:
    most = MAX_CARDS_PER_CONTAINER * WHOLE_CARD_CORE
    next_whole = min(most, (request.core // WHOLE_CARD_CORE + 1) * WHOLE_CARD_CORE)
    return RuleBroken(
        describe(request),
        "core on one card is 1 to 99, or a multiple of 100 for whole cards",
        f"ask for core 1 to 99, or {next_whole} without memory",
    )


def _check_even(name: str, total: int, cards: int, asked: str) -> None:
    if total % cards:
        below = total - total % cards
        choices = [str(n) for n in (below, below + cards) if n > 0]
        raise RuleBroken(
            asked,
            f"{name} is the total over the cards, and {total} does not divide by {cards}",
            f"ask for {name} {' or '.join(choices)}",
        )


def _check_device_named_once(request: Request, cards: int) -> None:
    if request.device_index is not None and cards > 1:
        raise RuleBroken(
            describe(request),
            f"one device is named, and {cards} cards are asked for",
            "leave the device out and let placement choose",
        )


def _warnings(request: Request, share: CardShare) -> List[str]:
    found = []
    weight, memory_mib = share.compute_weight, share.memory_mib
    if weight % RECOMMENDED_CORE_STEP:
        found.append(
            f"core {weight} a card: recommended is {RECOMMENDED_CORE_STEP} or more, "
            f"in steps of {RECOMMENDED_CORE_STEP}"
        )
    if memory_mib is not None and memory_mib < RECOMMENDED_MEMORY_MIB:
        found.append(
            f"memory {memory_mib} MiB: recommended is {RECOMMENDED_MEMORY_MIB} MiB or more, "
            "as a CUDA context alone takes some hundred"
        )
    if request.containers_in_pod > RECOMMENDED_CONTAINERS_IN_POD:
        found.append(
            f"{request.containers_in_pod} containers in the pod: "
            f"recommended are at most {RECOMMENDED_CONTAINERS_IN_POD}"
        )
    return found
