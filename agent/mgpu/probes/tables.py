"""The maps by meaning: who is bound, what each may use, what each uses. The only reader and writer.

Each map has one writer (bpf/mgpu.h says which), save where a process dies: its part is taken out
of the counters by a program, in the kernel or at our request, as only programs can do that with
atomics.
"""

import struct
from ctypes import Structure, c_uint32, sizeof
from typing import Dict, Iterable, List, Mapping, Tuple, Type, TypeVar

from mgpu import bpf
from mgpu.model import Container, Enforcer, Kill, MemoryUse, PidUse
from mgpu.nodes import Numbers
from mgpu.probes import layout
from mgpu.probes.loader import Loader
from mgpu.unseen import ProcessShare

T = TypeVar("T", bound=Structure)
# Where the driver refuses by itself the programs only count.
_ENFORCE = {
    Enforcer.NATIVE: layout.ENFORCE_OBSERVE,
    Enforcer.KILL: layout.ENFORCE_KILL,
    Enforcer.OBSERVE: layout.ENFORCE_OBSERVE,
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_PACKET_HEAD = bytes(14)


class Tables:
    """Over the maps of a Loader whose ``ensure`` has run."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    # What the agent says

    def set_settings(self, numbers: Numbers, context_bytes: int) -> None:
        """The device numbers, and what a context costs."""
        wanted = layout.Settings(
            context_bytes,
            numbers.card_major,
            numbers.ctl_minor,
            max(numbers.uvm_major, 0),
            numbers.uvm_minor,
            (c_uint32 * layout.CLOSED_MAJORS)(*numbers.others[: layout.CLOSED_MAJORS]),
        )
        self._put("settings", _U32.pack(0), bytes(wanted))

    def set_uuids(self, minor_of: Mapping[bytes, int]) -> None:
        """Which minor the card with a UUID (16 bytes) has."""
        for uuid, minor in minor_of.items():
            self._put("uuids", uuid, _U32.pack(minor))

    def bind(
        self, key: int, container: Container, minor_of: Mapping[str, int], enforcer: Enforcer
    ) -> None:
        """Limits and counters of the container's instances, then the cgroup that they belong to.

        ``key`` names the cgroup (cgroups.key); ``minor_of`` has the minor by device UUID.
        """
        for instance in container.instances:
            self._set_limit(instance.share_id, instance.vmem_limit_bytes, enforcer)
            if self._map("counts").lookup(_U32.pack(instance.share_id)) is None:
                none = bytes(sizeof(layout.Count))
                self._map("counts").update(_U32.pack(instance.share_id), none, bpf.MAP_NOEXIST)
        entry = layout.Bound(len(container.instances))
        by_index = sorted(container.instances, key=lambda instance: instance.device_index)
        for place, instance in enumerate(by_index):
            entry.cards[place] = layout.Card(instance.share_id, minor_of[instance.device_uuid])
        self._put("bound", _U64.pack(key), bytes(entry))

    def unbind(self, key: int) -> None:
        """From now on no process of this cgroup is the container's."""
        self._map("bound").delete(_U64.pack(key))
        for tid, followed in list(self._map("followed").items()):
            if _U64.unpack(followed)[0] == key:
                self._map("followed").delete(tid)

    def follow(self, tids: Iterable[int], key: int) -> None:
        """These threads, and those that they start, are of the container ``key``."""
        for tid in tids:
            self._put("followed", _U32.pack(tid), _U64.pack(key))

    def remove_share(self, share_id: int) -> None:
        """Forget an instance's figures."""
        for name in ("held", "unseen"):
            for raw in self._map(name).key_list():
                if layout.HeldKey.from_buffer_copy(raw).share_id == share_id:
                    self._map(name).delete(raw)
        for name in ("limits", "counts"):
            self._map(name).delete(_U32.pack(share_id))

    def set_unseen(self, unseen: Mapping[ProcessShare, int]) -> None:
        """Charge these processes more than was counted; processes not named here are not."""
        table = self._map("unseen")
        sums: Dict[int, int] = {}
        for (pid, share_id), nbytes in unseen.items():
            if nbytes:
                self._put("unseen", bytes(layout.HeldKey(pid, share_id)), _U64.pack(nbytes))
                sums[share_id] = sums.get(share_id, 0) + nbytes
        for raw in table.key_list():
            key = layout.HeldKey.from_buffer_copy(raw)
            if not unseen.get((key.tgid, key.share_id)):
                table.delete(raw)
        for share_id, limit in self._limits().items():
            if limit.unseen_bytes != sums.get(share_id, 0):
                limit.unseen_bytes = sums.get(share_id, 0)
                self._put("limits", _U32.pack(share_id), bytes(limit))

    def drop_process(self, pid: int) -> None:
        """Take out what a process that has ended was charged."""
        command = layout.Command(layout.DROP_PROCESS, pid)
        bpf.test_run(self._loader.program("mgpu_command"), _PACKET_HEAD + bytes(command))

    # What the programs say

    def bound(self) -> Dict[int, Tuple[int, ...]]:
        """The share ids by the cgroup's key."""
        return {
            _U64.unpack(key)[0]: tuple(card.share_id for card in entry.cards[: entry.card_count])
            for key, entry in self._entries("bound", layout.Bound)
        }

    def share_ids(self) -> List[int]:
        return [_U32.unpack(key)[0] for key, _ in self._map("limits").items()]

    def tracked(self) -> Dict[ProcessShare, int]:
        """Bytes counted, by process and share."""
        return {
            _pair(key): _not_negative(held.bytes)
            for key, held in self._entries("held", layout.Held)
        }

    def unseen(self) -> Dict[ProcessShare, int]:
        """Bytes charged beyond those counted, by process and share."""
        return {_pair(raw): _U64.unpack(value)[0] for raw, value in self._map("unseen").items()}

    def usage(self) -> Dict[int, MemoryUse]:
        """The figures of every instance."""
        unseen = self.unseen()
        pids: Dict[int, List[PidUse]] = {}
        for raw, held in self._entries("held", layout.Held):
            pid, share_id = _pair(raw)
            extra = unseen.pop((pid, share_id), 0)
            tracked = _not_negative(held.bytes)
            if tracked or extra or held.contexts:
                use = PidUse(pid, tracked, extra, held.contexts)
                pids.setdefault(share_id, []).append(use)
        for (pid, share_id), extra in unseen.items():
            pids.setdefault(share_id, []).append(PidUse(pid, 0, extra))
        limits = self._limits()
        return {
            share_id: MemoryUse(
                share_id,
                limits[share_id].limit_bytes,
                _not_negative(count.used_bytes) + limits[share_id].unseen_bytes,
                count.denials,
                count.kills,
                tuple(sorted(pids.get(share_id, ()), key=lambda use: use.pid)),
            )
            for share_id, count in self._counts().items()
            if share_id in limits
        }

    def take_kills(self) -> List[Kill]:
        """What was refused since the last call, oldest first; forgotten by this."""
        found = []
        for key, record in self._entries("kills", layout.Kill):
            found.append(
                Kill(
                    record.share_id,
                    record.tgid,
                    record.comm.decode(errors="replace"),
                    record.asked_bytes,
                    record.held_bytes,
                    record.used_bytes,
                    record.limit_bytes,
                    bool(record.killed),
                    record.at_ns,
                )
            )
            self._map("kills").delete(key)
        return sorted(found, key=lambda kill: kill.at_ns)

    def pids(self) -> List[int]:
        """Processes that were charged anything."""
        return [_U32.unpack(key)[0] for key, _ in self._map("processes").items()]

    def born_ns(self, pid: int) -> int:
        """When the process was first charged, in ns of CLOCK_MONOTONIC; 0 when it never was."""
        raw = self._map("processes").lookup(_U32.pack(pid))
        return layout.Process.from_buffer_copy(raw).born_ns if raw else 0

    def sweep_objects(self) -> int:
        """Delete what dead processes left in `objects`; how many. Slow: it reads them all."""
        seen = [
            (key, layout.ObjectKey.from_buffer_copy(key).tgid, value.born_ns)
            for key, value in self._entries("objects", layout.Object)
        ]
        # Read after the objects: whoever owns one and is not here now has died.
        born = {
            _U32.unpack(key)[0]: process.born_ns
            for key, process in self._entries("processes", layout.Process)
        }
        swept = 0
        for key, tgid, born_ns in seen:
            if born.get(tgid) != born_ns and self._owner_of(key) == born_ns:
                swept += self._map("objects").delete(key)
        return swept

    def unrecorded(self) -> int:
        """Allocations that `objects` had no room for; charged until their process ends."""
        return sum(count.unrecorded for count in self._counts().values())

    # Plumbing

    def _owner_of(self, key: bytes) -> int:
        """The stamp of the process that an object is of; 0: there is none (any more)."""
        raw = self._map("objects").lookup(key)
        return layout.Object.from_buffer_copy(raw).born_ns if raw else 0

    def _map(self, name: str) -> bpf.Map:
        return self._loader.map(name)

    def _put(self, name: str, key: bytes, value: bytes) -> None:
        """Write only what differs: a write to a map that programs read is not free of races."""
        if self._map(name).lookup(key) != value:
            self._map(name).update(key, value)

    def _set_limit(self, share_id: int, limit_bytes: int, enforcer: Enforcer) -> None:
        now = self._map("limits").lookup(_U32.pack(share_id))
        unseen = layout.Limit.from_buffer_copy(now).unseen_bytes if now else 0
        wanted = bytes(layout.Limit(limit_bytes, unseen, _ENFORCE[enforcer]))
        if now != wanted:
            self._map("limits").update(_U32.pack(share_id), wanted)

    def _entries(self, name: str, kind: Type[T]) -> List[Tuple[bytes, T]]:
        return [(key, kind.from_buffer_copy(value)) for key, value in self._map(name).items()]

    def _limits(self) -> Dict[int, layout.Limit]:
        return {_U32.unpack(k)[0]: v for k, v in self._entries("limits", layout.Limit)}

    def _counts(self) -> Dict[int, layout.Count]:
        return {_U32.unpack(k)[0]: v for k, v in self._entries("counts", layout.Count)}


def _pair(raw: bytes) -> ProcessShare:
    key = layout.HeldKey.from_buffer_copy(raw)
    return key.tgid, key.share_id


def _not_negative(counter: int) -> int:
    """A 64-bit counter read between the parts of a change may be a little below zero."""
    return 0 if counter >> 63 else counter
