"""Where the functions of a shared library lie in its file: as much of ELF as uprobes need."""

import struct
from pathlib import Path
from typing import BinaryIO, Dict, List, NamedTuple, Tuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LOAD = 1
_DYNSYM = 11
_FUNCTION = 2


class _Load(NamedTuple):
    offset: int
    address: int
    size: int


def function_offsets(path: Path) -> Dict[str, int]:
    """File offset of every function in the dynamic symbol table; aliases share an offset.

    Raises OSError, and ValueError where the file is not a 64-bit little-endian ELF library.
    """
    with open(path, "rb") as stream:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size or head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        fields = _HEADER.unpack(head)
        loads = _loads(_table(stream, fields[5], fields[9], fields[10], _PROGRAM))
        sections = _table(stream, fields[6], fields[11], fields[12], _SECTION)
        found: Dict[str, int] = {}
        for section in sections:
            if section[1] != _DYNSYM or section[6] >= len(sections):
                continue
            names = _bytes(stream, sections[section[6]])
            found.update(_functions(_bytes(stream, section), names, loads))
        return found


def _table(
    stream: BinaryIO, offset: int, entry_size: int, count: int, layout: struct.Struct
) -> List[Tuple[int, ...]]:
    if entry_size < layout.size:
        return []
    stream.seek(offset)
    data = stream.read(entry_size * count)
    last = len(data) - layout.size
    return [layout.unpack_from(data, at) for at in range(0, last + 1, entry_size)]


def _bytes(stream: BinaryIO, section: Tuple[int, ...]) -> bytes:
    stream.seek(section[4])
    data: bytes = stream.read(section[5])
    return data


def _loads(programs: List[Tuple[int, ...]]) -> List[_Load]:
    return [_Load(p[2], p[3], p[5]) for p in programs if p[0] == _LOAD]


def _functions(symbols: bytes, names: bytes, loads: List[_Load]) -> Dict[str, int]:
    found = {}
    for at in range(0, len(symbols) - _SYMBOL.size + 1, _SYMBOL.size):
        name_at, info, _, section, address, _ = _SYMBOL.unpack_from(symbols, at)
        if info & 0xF != _FUNCTION or not section:
            continue
        name = names[name_at : names.find(b"\0", name_at)].decode(errors="replace")
        for load in loads:
            if load.address <= address < load.address + load.size:
                found[name] = address - load.address + load.offset
    return found
