"""Which card holds a request, and under which instance number. Pure: loads in, placements out.

Score of a card (or of a node, over the sums of its cards) with the request already on it:

    score = (20 * (free core / all core)^2 + 80 * (free memory / all memory)^2) / 100

1.0 is empty, 0.0 is full. ``binpack`` takes the lowest score, ``spread`` the highest; equal scores
go to the lower device index. Core counts in the pool of the request: online and offline containers
each have 100 % of a device to give out, since offline ones only run on what online ones leave.
Memory is one pool, as a byte can be held once.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Collection, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

from mgpu import rules
from mgpu.errors import NoRoom, NotFound, RuleBroken
from mgpu.model import (
    MAX_INSTANCES_PER_DEVICE,
    MIB,
    Container,
    Device,
    Instance,
    Policy,
    Request,
)
from mgpu.rules import WHOLE_CARD_CORE, CardShare
from mgpu.units import mib_down

CORE_IN_SCORE = 20
MEMORY_IN_SCORE = 80
CARDS_NAMED = 8  # in a refusal: more would not be read


class Strategy(str, Enum):
    """How to choose among cards, or nodes, that all have room."""

    BINPACK = "binpack"
    SPREAD = "spread"


@dataclass(frozen=True)
class CardLoad:
    """One device and what has been given out of it. ``reserve_bytes`` is never given out."""

    device: Device
    policy: Policy
    weight_online: int = 0
    weight_offline: int = 0
    memory_bytes: int = 0
    instance_ids: FrozenSet[int] = frozenset()
    healthy: bool = True
    reserve_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """What can be given out in all, in whole MiB."""
        return mib_down(max(0, self.device.vmem_usable_bytes - self.reserve_bytes)) * MIB

    @property
    def free_bytes(self) -> int:
        return max(0, self.usable_bytes - self.memory_bytes)

    @property
    def free_instance_id(self) -> Optional[int]:
        """The lowest instance number not in use; None: all 16 are."""
        free = (i for i in range(MAX_INSTANCES_PER_DEVICE) if i not in self.instance_ids)
        return next(free, None)

    def free_weight(self, online: bool) -> int:
        """Percent of the device not given out to online (or to offline) containers."""
        return max(0, WHOLE_CARD_CORE - (self.weight_online if online else self.weight_offline))


@dataclass(frozen=True)
class Placement:
    """An instance to be: everything but its share_id, which the ledger gives."""

    device_uuid: str
    device_index: int
    instance_id: int
    compute_weight: int
    vmem_limit_bytes: int
    whole_card: bool = False


def loads(
    devices: Iterable[Device],
    containers: Iterable[Container],
    policies: Mapping[str, Policy],
    default_policy: Policy,
    unhealthy: Collection[str] = (),
    reserve_bytes: int = 0,
) -> List[CardLoad]:
    """What the ledger's ``containers`` leave of ``devices``; ``unhealthy`` holds device UUIDs.

    Instances on devices that are not in the list (a card taken out) count nowhere.
    """
    held = list(containers)
    return [
        _load(
            CardLoad(
                device,
                rules.policy_of(device.uuid, policies, default_policy, held),
                healthy=device.uuid not in unhealthy,
                reserve_bytes=reserve_bytes,
            ),
            held,
        )
        for device in devices
    ]


def choose(
    request: Request, cards: Sequence[CardLoad], strategy: Strategy
) -> Tuple[Placement, ...]:
    """One placement on each of the cards that ``request`` asks for, by device index.

    Raises RuleBroken, NotFound for a named device that does not exist, or NoRoom, which tells what
    each card has free.
    """
    share = rules.per_card(request)
    candidates = _named(request, cards)
    if len(candidates) >= share.cards:  # else no policy would help
        rules.check_policies(request, _policies(candidates))
    fitting = [card for card in candidates if _obstacle(request, share, card) is None]
    if len(fitting) < share.cards:
        raise _no_room(request, share, candidates, len(fitting))
    sign = 1 if strategy is Strategy.BINPACK else -1
    ranked = sorted(
        fitting,
        key=lambda card: (sign * card_score(card, share, request.online), card.device.index),
    )
    chosen = sorted(ranked[: share.cards], key=lambda card: card.device.index)
    return tuple(_placement(card, share) for card in chosen)


def resize(container: Container, request: Request, cards: Sequence[CardLoad]) -> Container:
    """``container`` with what ``request`` (its totals) gives it on the cards it holds already.

    Whatever does not grow is always possible, also on a card that has less to give than before.
    Raises RuleBroken, NotFound when one of its devices is gone, or NoRoom.
    """
    share = rules.per_card(request)
    held = len(container.instances)
    if share.cards != held:
        raise RuleBroken(
            rules.describe(request),
            f"container {container.short_id} holds {held} card{'s' if held > 1 else ''}, "
            "and a change in place cannot alter how many",
            "release it and bind it again",
        )
    own = [_card_of(container, instance, cards) for instance in container.instances]
    rules.check_policies(request, _policies(own))
    resized = [
        _resized(container, instance, request, share, card)
        for instance, card in zip(container.instances, own)
    ]
    return replace(
        container, instances=tuple(resized), online=request.online, enforcer=request.enforcer
    )


def card_score(card: CardLoad, share: CardShare, online: bool) -> float:
    """The score of ``card`` once it holds ``share``, 0.0 (full) to 1.0 (empty)."""
    memory = _memory_bytes(share, card)
    return free_score(
        card.free_weight(online) - share.compute_weight,
        WHOLE_CARD_CORE,
        card.free_bytes - memory,
        card.usable_bytes,
    )


def node_score(request: Request, cards: Sequence[CardLoad], strategy: Strategy) -> Optional[float]:
    """How well a node suits ``request``, 0 to 100, higher is better; None: it cannot hold it.

    ``cards`` are all cards of the node. The formula of a card over the sums of its healthy cards,
    with the request taken off; for binpack turned round. Raises RuleBroken where no node would do.
    """
    rules.per_card(request)
    try:
        chosen = choose(request, cards, strategy)
    except (NoRoom, RuleBroken):
        return None
    healthy = [card for card in cards if card.healthy]
    score = free_score(
        sum(c.free_weight(request.online) for c in healthy) - sum(p.compute_weight for p in chosen),
        WHOLE_CARD_CORE * len(healthy),
        sum(c.free_bytes for c in healthy) - sum(p.vmem_limit_bytes for p in chosen),
        sum(c.usable_bytes for c in healthy),
    )
    return 100 * (score if strategy is Strategy.SPREAD else 1 - score)


def free_score(free_core: int, all_core: int, free_memory: int, all_memory: int) -> float:
    """The weighted mean of the squared free ratios; nothing to give counts as full."""
    core = free_core / all_core if all_core else 0.0
    memory = free_memory / all_memory if all_memory else 0.0
    return (CORE_IN_SCORE * core**2 + MEMORY_IN_SCORE * memory**2) / (
        CORE_IN_SCORE + MEMORY_IN_SCORE
    )


def _load(card: CardLoad, containers: Iterable[Container]) -> CardLoad:
    weights = {True: 0, False: 0}
    memory_bytes = 0
    taken = set()
    for container in containers:
        for instance in container.instances:
            if instance.device_uuid == card.device.uuid:
                weights[container.online] += instance.compute_weight
                memory_bytes += instance.vmem_limit_bytes
                taken.add(instance.instance_id)
    return replace(
        card,
        weight_online=weights[True],
        weight_offline=weights[False],
        memory_bytes=memory_bytes,
        instance_ids=frozenset(taken),
    )


def _named(request: Request, cards: Sequence[CardLoad]) -> List[CardLoad]:
    if request.device_index is None:
        return sorted(cards, key=lambda card: card.device.index)
    named = [card for card in cards if card.device.index == request.device_index]
    if not named:
        known = ", ".join(str(card.device.index) for card in cards[:CARDS_NAMED])
        raise NotFound(
            f"device {request.device_index}",
            "no such device on this node",
            f"choose one of {known}" if known else "see 'mgpu-cli check' for why there is none",
        )
    return named


def _policies(cards: Iterable[CardLoad]) -> Dict[int, Policy]:
    return {card.device.index: card.policy for card in cards}


def _memory_bytes(share: CardShare, card: CardLoad) -> int:
    return card.usable_bytes if share.memory_mib is None else share.memory_mib * MIB


def _obstacle(request: Request, share: CardShare, card: CardLoad) -> Optional[str]:
    """What keeps ``card`` from holding one part of ``request``; None: nothing."""
    if not card.healthy:
        return "is out of service"
    if share.needs_native_burst and card.policy is not Policy.NATIVE_BURST_SHARE:
        return f"is under {card.policy.label}"
    if card.free_instance_id is None:
        return f"has all of its {MAX_INSTANCES_PER_DEVICE} instances in use"
    if share.whole_card and card.instance_ids:
        return f"holds {len(card.instance_ids)} instance{'s' * (len(card.instance_ids) > 1)}"
    if (
        card.free_weight(request.online) < share.compute_weight
        or card.free_bytes < _memory_bytes(share, card)
        or card.usable_bytes == 0
    ):
        return f"has core {card.free_weight(request.online)} and {_free_text(card)} free"
    return None


def _free_text(card: CardLoad) -> str:
    return f"{mib_down(card.free_bytes)} MiB"


def _no_room(request: Request, share: CardShare, cards: Sequence[CardLoad], fitting: int) -> NoRoom:
    if not cards:
        return NoRoom(
            rules.describe(request), "this node has no device", "see 'mgpu-cli check' for why"
        )
    obstacles = [(card, _obstacle(request, share, card)) for card in cards]
    told = [f"device {card.device.index} {why}" for card, why in obstacles if why][:CARDS_NAMED]
    left_out = len(cards) - fitting - len(told)
    if left_out:
        told.append(f"and {left_out} more")
    need = (
        "no card has room"
        if share.cards == 1
        else (
            f"{share.cards} cards are needed and {fitting} of {len(cards)} "
            f"{'has' if fitting == 1 else 'have'} room"
        )
    )
    return NoRoom(
        rules.describe(request),
        f"{need}: {', '.join(told)}" if told else need,
        "release a container, or ask for what is free",
    )


def _placement(card: CardLoad, share: CardShare) -> Placement:
    instance_id = card.free_instance_id
    assert instance_id is not None, "_obstacle() lets no such card through"
    return Placement(
        device_uuid=card.device.uuid,
        device_index=card.device.index,
        instance_id=instance_id,
        compute_weight=share.compute_weight,
        vmem_limit_bytes=_memory_bytes(share, card),
        whole_card=share.whole_card,
    )


def _card_of(container: Container, held: Instance, cards: Iterable[CardLoad]) -> CardLoad:
    for card in cards:
        if card.device.uuid == held.device_uuid:
            return card
    raise NotFound(
        f"device {held.device_index} ({held.device_uuid})",
        f"container {container.short_id} holds an instance on it, and it is gone",
        "bring the device back, or release the container",
    )


def _resized(
    container: Container, held: Instance, request: Request, share: CardShare, card: CardLoad
) -> Instance:
    """``held`` with its part of ``request``; what it holds now counts as free for it."""
    same_pool = request.online == container.online
    pool = card.weight_online if request.online else card.weight_offline
    free_weight = max(0, WHOLE_CARD_CORE - pool + (held.compute_weight if same_pool else 0))
    free_bytes = max(0, card.usable_bytes - card.memory_bytes + held.vmem_limit_bytes)
    memory_bytes = _memory_bytes(share, card)
    kept_weight = held.compute_weight if same_pool else 0
    no_weight = share.compute_weight > max(kept_weight, free_weight)
    no_memory = memory_bytes > max(held.vmem_limit_bytes, free_bytes)
    if no_weight or no_memory:
        raise NoRoom(
            rules.describe(request),
            f"device {card.device.index} has core {free_weight} and {mib_down(free_bytes)} MiB "
            f"for container {container.short_id}, counting what it holds now",
            "release another container, or ask for what is free",
        )
    return replace(
        held,
        device_index=card.device.index,
        compute_weight=share.compute_weight,
        vmem_limit_bytes=memory_bytes,
        whole_card=share.whole_card,
    )
