"""What the front (figures, service, metrics) is told of the agent itself, as small values."""

from dataclasses import dataclass
from typing import Callable, Mapping, Optional

from mgpu.model import Enforcer, MemoryUse


@dataclass(frozen=True)
class NodeFacts:
    """What this agent is and does on this node.

    ``compute_scheduled`` says whether shares of device time are enforced here; ``card_major`` is
    the major number of the device nodes, None before any was made.
    """

    version: str
    tracker: str
    enforcer: Enforcer
    simulated: bool = False
    compute_scheduled: bool = False
    card_major: Optional[int] = None
    started_at_s: float = 0.0


# share_id -> figures of the tracker; an instance without an entry has no figures now.
Usage = Callable[[], Mapping[int, MemoryUse]]
