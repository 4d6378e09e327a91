"""What the node holds and uses right now, gathered from the ledger, the tracker and the driver.

Reads only; the API, the CLI's tables and /metrics all show what comes from here, so that they
agree. Every figure is read when it is asked for: nothing can be stuck at an old value.
"""

from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mgpu import log
from mgpu.config import Config
from mgpu.devices import Card, Devices
from mgpu.errors import MgpuError, NotCapable
from mgpu.ledger import Ledger
from mgpu.model import MIB, Container, MemoryUse
from mgpu.placement import CardLoad, loads
from mgpu.ports import NodeFacts, Usage
from mgpu.views import Row, container_rows, device_row


class Figures:
    """One place that knows where each figure is read."""

    def __init__(
        self,
        ledger: Ledger,
        devices: Devices,
        usage: Usage,
        facts: Callable[[], NodeFacts],
        config: Callable[[], Config],
    ) -> None:
        self.ledger = ledger
        self.devices = devices
        self.usage = usage
        self.facts = facts
        self.config = config

    def device_rows(self) -> List[Row]:
        """One row for each card, by index. Raises NotCapable while no card was ever seen."""
        facts, cards = self.facts(), self.devices.cards()
        return [device_row(load, card, facts) for load, card in zip(self.loads_of(cards), cards)]

    def container_rows(self, containers: Optional[Sequence[Container]] = None) -> List[Row]:
        """One row for each instance of ``containers``; of all without it."""
        if containers is None:
            containers = self.ledger.containers()
        cards = {card.device.uuid: card for card in self.seen_cards()}
        usage, facts = self._usage_now(), self.facts()
        return [row for c in containers for row in container_rows(c, cards, usage, facts)]

    def use_of(self, container: Container) -> Dict[int, Optional[MemoryUse]]:
        """The tracker's figures by share_id; None where it has none."""
        usage = self._usage_now()
        return {i.share_id: usage.get(i.share_id) for i in container.instances}

    def _usage_now(self) -> Mapping[int, MemoryUse]:
        """The tracker's figures; none at all where its maps cannot be read."""
        try:
            return self.usage()
        except (MgpuError, OSError) as error:
            log.warning("usage-unreadable", why=error)
            return {}

    def seen_cards(self) -> Tuple[Card, ...]:
        """The cards; none while NVML has never answered."""
        try:
            return self.devices.cards()
        except NotCapable:
            return ()

    def status(self) -> Row:
        """What the agent is and how much it looks after."""
        facts, containers, cards = self.facts(), self.ledger.containers(), self.seen_cards()
        return {
            "version": facts.version,
            "tracker": facts.tracker,
            "enforcer": facts.enforcer.value,
            "simulated": facts.simulated,
            "started_at_s": facts.started_at_s,
            "devices": len(cards),
            "devices_lost": sum(1 for card in cards if card.lost),
            "containers": len(containers),
            "instances": sum(len(container.instances) for container in containers),
        }

    def loads_of(self, cards: Sequence[Card]) -> List[CardLoad]:
        """What is given out of each of ``cards``; a lost one is not healthy."""
        config = self.config()
        return loads(
            [card.device for card in cards],
            self.ledger.containers(),
            self.ledger.policies(),
            config.policy,
            [card.device.uuid for card in cards if card.lost],
            config.reserve_mib * MIB,
        )
