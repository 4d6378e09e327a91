"""The cards, through NVML: which there are, what each holds, and which of them are lost.

It changes nothing on a card; native.py, which does, asks through it. Every figure comes from one
reading of all cards, at most ``max_age_s`` old, so that figures shown together belong together.
A card that cannot be read keeps its identity (the UUID) but loses its figures, with the reason,
until it can be read again; the other cards go on meanwhile.
"""

import functools
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

import pynvml  # type: ignore[import-untyped]

from mgpu import log
from mgpu.caller import Caller, NoAnswer, result_of
from mgpu.errors import NotCapable
from mgpu.model import Device

ANSWER_WITHIN_S = 3.0
MAX_AGE_S = 1.0
RECONNECT_AFTER_S = 10.0
SIMULATED_MARK = "(simulated)"

T = TypeVar("T")


@dataclass(frozen=True)
class Figures:
    """What a card says of itself. ``used_bytes`` is without the driver's own ``reserved_bytes``.

    ``utilisation_ratio`` is the part of the last sample period (1/6 to 1 s) in which a kernel ran,
    0 to 1; None where the card does not tell.
    """

    total_bytes: int
    reserved_bytes: int
    used_bytes: int
    free_bytes: int
    utilisation_ratio: Optional[float]


@dataclass(frozen=True)
class Card:
    """One card as of the last reading.

    ``lost`` is the reason why it cannot be read, empty when it can; then, and only then, there are
    ``figures``. ``process_bytes`` maps PIDs (of this process's PID namespace) to device memory;
    None where NVML keeps no such figures. A process whose figure NVML does not have is left out.
    """

    device: Device
    lost: str = ""
    figures: Optional[Figures] = None
    process_bytes: Optional[Dict[int, int]] = None

    @property
    def state(self) -> str:
        """``ok`` or ``lost``."""
        return "lost" if self.lost else "ok"


class Devices:
    """The cards of this node. Safe to use from several threads.

    Every method that reads raises NotCapable while NVML cannot be used at all and no card has been
    seen yet; the next call tries again. After that a failing NVML shows as cards that are lost.
    """

    def __init__(
        self,
        answer_within_s: float = ANSWER_WITHIN_S,
        max_age_s: float = MAX_AGE_S,
        reconnect_after_s: float = RECONNECT_AFTER_S,
    ) -> None:
        self._answer_within_s = answer_within_s
        self._max_age_s = max_age_s
        self._reconnect_after_s = reconnect_after_s
        self._lock = threading.Lock()
        self._connection = Caller("nvml")
        self._connected = False
        self._connected_at = float("-inf")
        self._unreadable: Dict[int, str] = {}
        self._driver_version = ""
        self._slots: Dict[str, _Slot] = {}
        self._read_at = float("-inf")
        self._cards: Tuple[Card, ...] = ()
        self._failure: Optional[NotCapable] = None

    def cards(self) -> Tuple[Card, ...]:
        """Every card ever seen, in NVML's order, read now unless the last reading is fresh."""
        return self._read(self._max_age_s)

    def fresh_cards(self) -> Tuple[Card, ...]:
        """As ``cards``, but read after this call began (for a comparison with other figures)."""
        return self._read(0.0)

    def inventory(self) -> Tuple[Device, ...]:
        """The devices, lost ones too, in NVML's order."""
        return tuple(card.device for card in self.cards())

    def card(self, uuid: str) -> Optional[Card]:
        """The card with this UUID, or None when NVML has never listed it."""
        return next((card for card in self.cards() if card.device.uuid == uuid), None)

    def process_memory(self, device: Device) -> Optional[Dict[int, int]]:
        """Bytes of device memory by PID as the driver counts them (context included).

        None where there are no such figures now: the card is lost, or NVML does not keep them.
        """
        card = self.card(device.uuid)
        return None if card is None else card.process_bytes

    def figures(self, device: Device) -> Optional[Figures]:
        """The card's own figures, or None while it is lost."""
        card = self.card(device.uuid)
        return None if card is None else card.figures

    def driver_version(self) -> str:
        """The driver's version, e.g. ``580.95.05``."""
        self.cards()
        return self._driver_version

    def ask(self, uuid: str, call: Callable[[Any], T]) -> T:
        """What ``call`` answers, given NVML's handle of a card.

        Raises pynvml's NVMLError as it is, and NotCapable: no such card now, or no answer in time.
        """
        with self._lock:  # or a reading meanwhile would find the card busy, and call it lost
            slot = self._slots.get(uuid)
            answer = None if slot is None else slot.ask(call)
            if answer is None:
                raise NotCapable(f"device {uuid}", "NVML does not list it", "look for it in dmesg")
            try:
                return result_of(answer, time.monotonic() + self._answer_within_s)
            except NoAnswer as error:
                raise NotCapable(f"device {uuid}", _reason(error), "reset the card") from error

    def _read(self, max_age_s: float) -> Tuple[Card, ...]:
        with self._lock:
            if time.monotonic() - self._read_at >= max_age_s:
                self._refresh()
                self._read_at = time.monotonic()
            if self._failure is not None:
                raise self._failure
            return self._cards

    def _refresh(self) -> None:
        self._failure = None
        if self._connected and self._due_for_reconnect():
            self._connected = False
        if not self._connected:
            reason = self._connect()
            if reason:
                self._lose_all(reason)
                return
        slots = list(self._slots.values())
        answers = [slot.begin() for slot in slots]
        deadline_s = time.monotonic() + self._answer_within_s
        self._publish([slot.end(answer, deadline_s) for slot, answer in zip(slots, answers)])

    def _due_for_reconnect(self) -> bool:
        """NVML is opened anew for what ails a card, but not under a call that is still running."""
        if time.monotonic() - self._connected_at < self._reconnect_after_s:
            return False
        if any(slot.caller.busy for slot in self._slots.values()):
            return False
        if self._unreadable or not self._cards:
            return True
        return any(card.lost for card in self._cards)

    def _connect(self) -> str:
        """Open NVML and list the cards. Returns why that failed, or an empty string."""
        self._connected_at = time.monotonic()
        known = {uuid: slot.device for uuid, slot in self._slots.items()}
        answer = self._connection.ask(lambda: _open_nvml(known))
        try:
            listing = result_of(answer, self._connected_at + self._answer_within_s)
        except (pynvml.NVMLError, NoAnswer) as error:
            return _reason(error)
        self._connected = True
        self._driver_version = listing.driver_version
        for index, reason in listing.unreadable.items():
            if self._unreadable.get(index) != reason:
                log.warning("device-unreadable", index=index, reason=reason)
        self._unreadable = listing.unreadable
        for slot in self._slots.values():
            slot.unlist(listing.unreadable.get(slot.device.index, "NVML no longer lists it"))
        for device, handle in listing.cards:
            slot = self._slots.setdefault(device.uuid, _Slot(device))
            slot.relist(device, handle)
        return ""

    def _lose_all(self, reason: str) -> None:
        if self._slots:
            self._publish([Card(slot.device, lost=reason) for slot in self._slots.values()])
            return
        self._failure = NotCapable(
            "the cards of this node",
            f"NVML cannot be used ({reason})",
            "install the NVIDIA driver with its libnvidia-ml.so.1, or put the simulated one on"
            " LD_LIBRARY_PATH; the agent tries again by itself",
        )

    def _publish(self, cards: List[Card]) -> None:
        before = {card.device.uuid: card.lost for card in self._cards}
        for card in cards:
            was = before.get(card.device.uuid, "")
            if card.lost and card.lost != was:
                log.error("device-lost", device=card.device.uuid, reason=card.lost)
            elif was and not card.lost:
                log.event("device-back", device=card.device.uuid, was=was)
        self._cards = tuple(sorted(cards, key=lambda card: card.device.index))


@dataclass(frozen=True)
class _Reading:
    figures: Figures
    process_bytes: Optional[Dict[int, int]]


class _Slot:
    """A card that NVML has listed, with its handle for as long as it still does."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.caller = Caller(f"nvml-{device.uuid[:12]}")
        self._handle: Any = None
        self._unlisted = ""

    def relist(self, device: Device, handle: Any) -> None:
        self.device = device
        self._handle, self._unlisted = handle, ""

    def unlist(self, reason: str) -> None:
        self._handle, self._unlisted = None, reason

    def begin(self) -> "Optional[Future[_Reading]]":
        return self.ask(_read_card)

    def ask(self, call: Callable[[Any], T]) -> "Optional[Future[T]]":
        """Have ``call`` made with the card's handle; None: it has none."""
        handle = self._handle
        return None if handle is None else self.caller.ask(lambda: call(handle))

    def end(self, answer: "Optional[Future[_Reading]]", deadline_s: float) -> Card:
        """The card as the answer has it; lost when there is none by ``deadline_s`` (monotonic)."""
        if answer is None:
            return Card(self.device, lost=self._unlisted)
        try:
            reading = result_of(answer, deadline_s)
        except (pynvml.NVMLError, NoAnswer) as error:
            return Card(self.device, lost=_reason(error))
        return Card(self.device, figures=reading.figures, process_bytes=reading.process_bytes)


class _Listing(NamedTuple):
    driver_version: str
    cards: List[Tuple[Device, Any]]
    unreadable: Dict[int, str]


def _reason(error: Exception) -> str:
    return "NVML does not answer" if isinstance(error, NoAnswer) else f"NVML says: {error}"


def _open_nvml(known: Dict[str, Device]) -> _Listing:
    """(Re)initialise NVML, which makes all handles of before void, and list its cards."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    listing = _Listing(_text(pynvml.nvmlSystemGetDriverVersion()), [], {})
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            listing.cards.append((_identify(handle, index, known), handle))
        except pynvml.NVMLError as error:
            listing.unreadable[index] = _reason(error)
    return listing


def _identify(handle: Any, index: int, known: Dict[str, Device]) -> Device:
    """What does not change about a card, read once: only its index may, when NVML starts anew."""
    uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    if uuid in known:
        return replace(known[uuid], index=index, minor=pynvml.nvmlDeviceGetMinorNumber(handle))
    name = _text(pynvml.nvmlDeviceGetName(handle))
    memory = _memory(handle)
    return Device(
        index=index,
        uuid=uuid,
        name=name,
        minor=pynvml.nvmlDeviceGetMinorNumber(handle),
        vmem_total_bytes=memory.total,
        vmem_reserved_bytes=getattr(memory, "reserved", 0),
        pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        simulated=SIMULATED_MARK in name,
    )


def _read_card(handle: Any) -> _Reading:
    memory = _memory(handle)
    utilisation = _if_supported(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    figures = Figures(
        total_bytes=memory.total,
        reserved_bytes=getattr(memory, "reserved", 0),
        used_bytes=memory.used,
        free_bytes=memory.free,
        utilisation_ratio=None if utilisation is None else utilisation.gpu / 100.0,
    )
    return _Reading(figures, _process_bytes(handle))


def _memory(handle: Any) -> Any:
    """nvmlMemory_v2_t; from drivers before R510 the first form, whose ``used`` has ``reserved``."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError_FunctionNotFound:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _process_bytes(handle: Any) -> Optional[Dict[int, int]]:
    """Bytes by PID over the lists of NVML.

    A process with several kinds of context is in several lists with the same figure: no sum.
    """
    merged: Dict[int, int] = {}
    supported = False
    for kind in ("Compute", "Graphics", "MPSCompute"):
        processes = _process_list(handle, kind)
        supported = supported or processes is not None
        for process in processes or []:
            if process.usedGpuMemory is not None:
                merged[process.pid] = max(merged.get(process.pid, 0), process.usedGpuMemory)
    return merged if supported else None


def _process_list(handle: Any, kind: str) -> Any:
    """One of NVML's process lists; None where neither this driver nor this card has it.

    The form _v3 came with R510.
    """
    for version in ("_v3", "_v2"):
        function = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses{version}", None)
        if function is not None:
            processes = _if_supported(functools.partial(function, handle))
            if processes is not None:
                return processes
    return None


def _if_supported(call: Callable[[], T]) -> Optional[T]:
    try:
        return call()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def _text(value: Any) -> str:
    """Old releases of pynvml return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
