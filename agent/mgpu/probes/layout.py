"""The maps of bpf/mgpu.h as Python sees them: structs and map sizes. A test compares the two."""

from ctypes import Structure, c_char, c_int32, c_uint8, c_uint32, c_uint64
from typing import Dict, NamedTuple, Type, Union

from mgpu import bpf

MAX_CARDS = 8
MAX_SHARES = 16
CLOSED_MAJORS = 6
ROOT_SHIFT = 56
ENFORCE_OBSERVE = 0
ENFORCE_KILL = 1
DROP_PROCESS = 1

MEMORY = 1
PHYSICAL = 2
MAPPING = 3
CONTEXT = 4
PRIMARY = 5
POOL = 6


class Settings(Structure):
    _fields_ = [
        ("context_bytes", c_uint64),
        ("card_major", c_uint32),
        ("ctl_minor", c_uint32),
        ("uvm_major", c_uint32),
        ("uvm_minor", c_uint32),
        ("closed_majors", c_uint32 * CLOSED_MAJORS),
    ]


class Card(Structure):
    _fields_ = [("share_id", c_uint32), ("minor", c_uint32)]


class Bound(Structure):
    _fields_ = [("card_count", c_uint32), ("pad", c_uint32), ("cards", Card * MAX_CARDS)]


class Limit(Structure):
    _fields_ = [
        ("limit_bytes", c_uint64),
        ("unseen_bytes", c_uint64),
        ("enforcer", c_uint32),
        ("pad", c_uint32),
    ]


class Count(Structure):
    _fields_ = [
        ("used_bytes", c_uint64),
        ("denials", c_uint64),
        ("kills", c_uint64),
        ("unrecorded", c_uint64),
    ]


class Process(Structure):
    _fields_ = [
        ("born_ns", c_uint64),
        ("share_count", c_uint32),
        ("first", c_uint32),
        ("share_ids", c_uint32 * MAX_SHARES),
    ]


class HeldKey(Structure):
    _fields_ = [("tgid", c_uint32), ("share_id", c_uint32)]


class Held(Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("contexts", c_uint64),
        ("denials", c_uint64),
        ("calls", c_uint64),
    ]


class ObjectKey(Structure):
    _fields_ = [("handle", c_uint64), ("tgid", c_uint32), ("kind", c_uint32)]


class Object(Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("born_ns", c_uint64),
        ("context", c_uint64),
        ("stamp", c_uint64),
        ("share_id", c_uint32),
        ("references", c_int32),
    ]


class Call(Structure):
    _fields_ = [
        ("bytes", c_uint64),
        ("out", c_uint64),
        ("argument", c_uint64),
        ("extra", c_uint64),
        ("born_ns", c_uint64),
        ("context", c_uint64),
        ("stamp", c_uint64),
        ("share_id", c_uint32),
        ("kind", c_uint32),
        ("taken", Object),
    ]


class Thread(Structure):
    _fields_ = [("depth", c_uint32), ("pad", c_uint32), ("contexts", c_uint64 * 8)]


class OrdinalKey(Structure):
    _fields_ = [("tgid", c_uint32), ("ordinal", c_uint32)]


class Kill(Structure):
    _fields_ = [
        ("at_ns", c_uint64),
        ("asked_bytes", c_uint64),
        ("held_bytes", c_uint64),
        ("used_bytes", c_uint64),
        ("limit_bytes", c_uint64),
        ("share_id", c_uint32),
        ("tgid", c_uint32),
        ("killed", c_uint32),
        ("pad", c_uint32),
        ("comm", c_char * 16),
    ]


class Uuid(Structure):
    _fields_ = [("bytes", c_uint8 * 16)]


class Command(Structure):
    _fields_ = [("verb", c_uint32), ("tgid", c_uint32)]


Layout = Union[Type[Structure], Type[c_uint32], Type[c_uint64]]


def describe(layout: Layout) -> str:
    """The layout in words that differ when it does."""
    if not issubclass(layout, Structure):
        return layout.__name__
    fields = [(field[0], getattr(layout, field[0])) for field in layout._fields_]
    said = " ".join(f"{name}@{place.offset}+{place.size}" for name, place in fields)
    return f"{layout.__name__}({said})"


class MapSpec(NamedTuple):
    """What the map is created with; equal to its definition in bpf/*.h."""

    map_type: int
    key: Layout
    value: Layout
    max_entries: int
    flags: int = 0


_HASH, _ARRAY, _LAZY = bpf.MAP_TYPE_HASH, bpf.MAP_TYPE_ARRAY, bpf.F_NO_PREALLOC

MAPS: Dict[str, MapSpec] = {
    "settings": MapSpec(_ARRAY, c_uint32, Settings, 1),
    "bound": MapSpec(_HASH, c_uint64, Bound, 4096),
    "followed": MapSpec(_HASH, c_uint32, c_uint64, 65536, _LAZY),
    "limits": MapSpec(_HASH, c_uint32, Limit, 8192),
    "counts": MapSpec(_HASH, c_uint32, Count, 8192),
    "processes": MapSpec(_HASH, c_uint32, Process, 65536, _LAZY),
    "held": MapSpec(_HASH, HeldKey, Held, 65536, _LAZY),
    "unseen": MapSpec(_HASH, HeldKey, c_uint64, 65536, _LAZY),
    "objects": MapSpec(_HASH, ObjectKey, Object, 1048576, _LAZY),
    "kills": MapSpec(_HASH, c_uint64, Kill, 1024, _LAZY),
    "calls": MapSpec(_HASH, c_uint64, Call, 65536, _LAZY),
    "threads": MapSpec(_HASH, c_uint64, Thread, 65536, _LAZY),
    "ordinals": MapSpec(_HASH, OrdinalKey, c_uint32, 16384, _LAZY),
    "uuids": MapSpec(_HASH, Uuid, c_uint32, 256),
}

STRUCTS: Dict[str, Type[Structure]] = {
    "mgpu_settings": Settings,
    "mgpu_card": Card,
    "mgpu_bound": Bound,
    "mgpu_limit": Limit,
    "mgpu_count": Count,
    "mgpu_process": Process,
    "mgpu_held_key": HeldKey,
    "mgpu_held": Held,
    "mgpu_object_key": ObjectKey,
    "mgpu_object": Object,
    "mgpu_call": Call,
    "mgpu_thread": Thread,
    "mgpu_ordinal_key": OrdinalKey,
    "mgpu_kill": Kill,
    "mgpu_uuid": Uuid,
    "mgpu_command": Command,
}
