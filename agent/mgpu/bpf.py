"""bpf(2) and the BPF file system, by system call: no LLVM, no bcc, small enough for the daemon.

Thin: each function is one command of the system call and raises OSError as the kernel does.
Layouts are those of union bpf_attr in linux/bpf.h (the floor is kernel 5.4; what came later says
so).
"""

import ctypes
import errno
import os
import platform
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

_SYSCALL = {"x86_64": 321, "aarch64": 280}
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}

MAP_CREATE = 0
MAP_LOOKUP = 1
MAP_UPDATE = 2
MAP_DELETE = 3
MAP_GET_NEXT_KEY = 4
PROG_LOAD = 5
OBJ_PIN = 6
OBJ_GET = 7
PROG_ATTACH = 8
PROG_DETACH = 9
PROG_TEST_RUN = 10
PROG_GET_FD_BY_ID = 13
OBJ_GET_INFO_BY_FD = 15
PROG_QUERY = 16
MAP_LOOKUP_BATCH = 24
LINK_CREATE = 28

ATTACH_CGROUP_DEVICE = 6
ATTACH_PERF_EVENT = 41
F_ALLOW_OVERRIDE = 1
F_ALLOW_MULTI = 2
F_REPLACE = 4
MAP_ANY = 0
MAP_NOEXIST = 1

MAP_TYPE_HASH = 1
MAP_TYPE_ARRAY = 2
MAP_TYPE_PROG_ARRAY = 3
PROG_TYPE_KPROBE = 2
PROG_TYPE_TRACEPOINT = 5
F_NO_PREALLOC = 1

_BATCH = 256
_WALKS = 10  # over a map that changes all the time
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(numbers: Dict[str, int], *arguments: object) -> int:
    """One system call by its number on this machine. Raises OSError."""
    result: int = _libc.syscall(numbers[platform.machine()], *arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def perf_event_open(attr: bytearray, pid: int, cpu: int) -> int:
    """A perf event's descriptor, close-on-exec (perf_event_open(2), PERF_FLAG_FD_CLOEXEC)."""
    buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
    arguments = (ctypes.c_int(pid), ctypes.c_int(cpu), ctypes.c_int(-1), ctypes.c_ulong(8))
    return syscall(_PERF_EVENT_OPEN, buffer, *arguments)


def _bpf(command: int, attr: bytearray) -> int:
    buffer = (ctypes.c_char * len(attr)).from_buffer(attr)
    return syscall(_SYSCALL, ctypes.c_int(command), buffer, ctypes.c_uint(len(attr)))


def _attr(form: str, *values: object, size: int = 0) -> bytearray:
    packed = struct.pack("<" + form, *values)
    return bytearray(packed.ljust(max(size, len(packed)), b"\0"))


def _address(buffer: "ctypes.Array[ctypes.c_char]") -> int:
    return ctypes.addressof(buffer)


@lru_cache(maxsize=None)
def kernel_version() -> Tuple[int, int]:
    """Major and minor of the running kernel."""
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


class MapInfo(NamedTuple):
    """What the kernel says of a map (struct bpf_map_info)."""

    map_type: int
    map_id: int
    key_size: int
    value_size: int
    max_entries: int


class ProgramInfo(NamedTuple):
    """What the kernel says of a program (struct bpf_prog_info); ``name`` has at most 15 bytes."""

    program_type: int
    program_id: int
    tag: str
    name: str


class Map:
    """A BPF map. Keys and values are bytes of the map's own sizes; owns its descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.info = map_info(fd)
        self._batches = True

    @classmethod
    def pinned(cls, path: Path) -> "Map":
        """The map pinned at ``path``."""
        return cls(obj_get(path))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def lookup(self, key: bytes) -> Optional[bytes]:
        """The value of ``key``; None when there is none."""
        value = ctypes.create_string_buffer(self.info.value_size)
        try:
            self._element(MAP_LOOKUP, key, value, 0)
        except FileNotFoundError:
            return None
        return value.raw

    def update(self, key: bytes, value: bytes, flags: int = MAP_ANY) -> None:
        """Set ``key``. Raises FileExistsError under MAP_NOEXIST, E2BIG when the map is full."""
        self._element(MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)), flags)

    def delete(self, key: bytes) -> bool:
        """Remove ``key``; False when it was not there."""
        try:
            self._element(MAP_DELETE, key, None, 0)
        except FileNotFoundError:
            return False
        return True

    def items(self) -> Iterator[Tuple[bytes, bytes]]:
        """All entries of a hash, each once unless the map changes meanwhile."""
        if self._batches:
            try:
                yield from self._batched()
                return
            except OSError as error:
                # Kernel 5.6 brought batches; ENOSPC: a bucket with more entries than a batch.
                if error.errno not in (errno.EINVAL, errno.ENOSPC, errno.EOPNOTSUPP, 524):
                    raise
                self._batches = error.errno == errno.ENOSPC
        for key in self.key_list():
            value = self.lookup(key)
            if value is not None:
                yield key, value

    def key_list(self) -> List[bytes]:
        """All keys, gathered before any is returned, so that the caller may delete them.

        A key that is deleted while the walk stands on it makes the kernel begin anew.
        """
        found: Dict[bytes, None] = {}
        again = 0
        key = None
        while again <= _WALKS * len(found) + _WALKS:
            key = self._next_key(key)
            if key is None:
                break
            again += key in found
            found[key] = None
        return list(found)

    def _next_key(self, key: Optional[bytes]) -> Optional[bytes]:
        old = ctypes.create_string_buffer(key, len(key)) if key is not None else None
        new = ctypes.create_string_buffer(self.info.key_size)
        attr = _attr("IIQQ", self.fd, 0, _address(old) if old else 0, _address(new), size=32)
        try:
            _bpf(MAP_GET_NEXT_KEY, attr)
        except FileNotFoundError:
            return None
        return new.raw

    def _batched(self) -> Iterator[Tuple[bytes, bytes]]:
        key_size, value_size = self.info.key_size, self.info.value_size
        keys = ctypes.create_string_buffer(key_size * _BATCH)
        values = ctypes.create_string_buffer(value_size * _BATCH)
        position = ctypes.create_string_buffer(max(key_size, 8))
        first, found = True, []
        while True:
            attr = _attr(
                "QQQQIIQQ",
                0 if first else _address(position),
                _address(position),
                _address(keys),
                _address(values),
                _BATCH,
                self.fd,
                0,
                0,
            )
            last = False
            try:
                _bpf(MAP_LOOKUP_BATCH, attr)
            except FileNotFoundError:
                last = True
            (count,) = struct.unpack_from("<I", attr, 32)
            raw_keys, raw_values = keys.raw, values.raw
            for i in range(count):
                found.append(
                    (
                        raw_keys[i * key_size : (i + 1) * key_size],
                        raw_values[i * value_size : (i + 1) * value_size],
                    )
                )
            if last:
                return iter(found)
            first = False

    def _element(
        self,
        command: int,
        key: bytes,
        value: "Optional[ctypes.Array[ctypes.c_char]]",
        flags: int,
    ) -> None:
        if len(key) != self.info.key_size:
            raise ValueError(f"key of {len(key)} bytes for a map of {self.info.key_size}")
        key_buffer = ctypes.create_string_buffer(key, len(key))
        where = _address(value) if value is not None else 0
        _bpf(command, _attr("IIQQQ", self.fd, 0, _address(key_buffer), where, flags))


def map_create(
    map_type: int, key_size: int, value_size: int, max_entries: int, flags: int, name: str
) -> int:
    """A new map's descriptor; ``name`` shows in bpftool, at most 15 bytes."""
    head = struct.pack("<IIIIIII", map_type, key_size, value_size, max_entries, flags, 0, 0)
    return _bpf(MAP_CREATE, bytearray((head + name.encode()[:15]).ljust(72, b"\0")))


def map_info(fd: int) -> MapInfo:
    """Raises OSError when ``fd`` is not a map."""
    buffer = _object_info(fd, 80)
    return MapInfo(*struct.unpack_from("<IIIII", buffer))


def program_info(fd: int) -> ProgramInfo:
    """Raises OSError when ``fd`` is not a program."""
    buffer = _object_info(fd, 128)
    program_type, program_id = struct.unpack_from("<II", buffer)
    name = buffer[64:80].split(b"\0")[0].decode(errors="replace")
    return ProgramInfo(program_type, program_id, buffer[8:16].hex(), name)


def _object_info(fd: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    _bpf(OBJ_GET_INFO_BY_FD, _attr("IIQ", fd, size, _address(buffer)))
    return buffer.raw


def obj_get(path: Path) -> int:
    """A descriptor of what is pinned at ``path``."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(OBJ_GET, _attr("QII", _address(name), 0, 0))


def obj_pin(fd: int, path: Path) -> None:
    """Pin a map, program or link at ``path``. Raises FileExistsError when that is taken."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(OBJ_PIN, _attr("QII", _address(name), fd, 0))


def prog_load(program_type: int, code: bytes, name: str) -> int:
    """Load raw instructions; the program's descriptor. ``name`` has at most 15 bytes."""
    text = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = _attr(
        "IIQQIIQII16s",
        program_type,
        len(code) // 8,
        _address(text),
        _address(licence),
        *(0, 0, 0, 0, 0),
        name.encode()[:15],
        size=72,
    )
    return _bpf(PROG_LOAD, attr)


def prog_by_id(program_id: int) -> int:
    """A descriptor of a loaded program. Raises FileNotFoundError when it is gone."""
    return _bpf(PROG_GET_FD_BY_ID, _attr("III", program_id, 0, 0))


def prog_attach(
    cgroup_fd: int, prog_fd: int, attach_type: int, flags: int, replace_fd: int = -1
) -> None:
    """Attach to a cgroup; with F_REPLACE (kernel 5.6) in place of ``replace_fd``."""
    values = (cgroup_fd, prog_fd, attach_type, flags)
    if flags & F_REPLACE:
        _bpf(PROG_ATTACH, _attr("IIIII", *values, replace_fd))
    else:
        _bpf(PROG_ATTACH, _attr("IIII", *values))


def prog_detach(cgroup_fd: int, prog_fd: int, attach_type: int) -> None:
    """Take a program from a cgroup. Raises FileNotFoundError when it is not there."""
    _bpf(PROG_DETACH, _attr("IIII", cgroup_fd, prog_fd, attach_type, 0))


def prog_query(cgroup_fd: int, attach_type: int) -> List[int]:
    """The ids of the programs attached to this very cgroup, in the order they run."""
    room = 64
    while True:
        ids = (ctypes.c_uint32 * room)()
        attr = _attr("IIIIQI", cgroup_fd, attach_type, 0, 0, ctypes.addressof(ids), room, size=64)
        try:
            _bpf(PROG_QUERY, attr)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            room *= 2
            continue
        (count,) = struct.unpack_from("<I", attr, 24)
        return list(ids[:count])


def attach_flags(cgroup_fd: int, attach_type: int) -> int:
    """The F_ flags that the programs of this very cgroup are attached with; 0 without any."""
    attr = _attr("IIIIQI", cgroup_fd, attach_type, 0, 0, 0, 0, size=64)
    _bpf(PROG_QUERY, attr)
    (flags,) = struct.unpack_from("<I", attr, 12)
    return int(flags)


def link_perf_event(prog_fd: int, event_fd: int) -> int:
    """A link of a program to a perf event, which can be pinned (kernel 5.15)."""
    return _bpf(LINK_CREATE, _attr("IIII", prog_fd, event_fd, ATTACH_PERF_EVENT, 0, size=64))


def is_bpffs(path: Path) -> bool:
    """Whether ``path`` lies on a BPF file system."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    (magic,) = struct.unpack_from("<q", buffer.raw)
    return bool(magic == 0xCAFE4A11)  # BPF_FS_MAGIC of linux/magic.h


def mount(kind: str, path: Path) -> None:
    """Mount a ``bpf`` or ``tracefs`` file system, for root alone, at ``path`` (a folder)."""
    where = ctypes.c_char_p(os.fsencode(path))
    if _libc.mount(kind.encode(), where, kind.encode(), ctypes.c_ulong(0), b"mode=0700") != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def test_run(prog_fd: int, data: bytes) -> None:
    """Run a program once over ``data`` (BPF_PROG_TEST_RUN; socket filters, kernel 4.12)."""
    packet = ctypes.create_string_buffer(data, len(data))
    out = ctypes.create_string_buffer(len(data) + 64)
    attr = _attr(
        "IIIIQQII", prog_fd, 0, len(data), len(out), _address(packet), _address(out), 1, 0, size=80
    )
    _bpf(PROG_TEST_RUN, attr)
