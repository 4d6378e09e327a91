"""Offsets of functions: against what the compiler and binutils say of real libraries."""

import subprocess

import pytest

from mgpu.probes.elf import function_offsets

SOURCE = """
int first(void) { return 1; }
int second(void) { return first() + 1; }
int second_v2(void) __attribute__((alias("second")));
__attribute__((visibility("hidden"))) int hidden(void) { return 3; }
static int internal(void) { return 4; }
int third(void) { return internal() + hidden(); }
int variable = 5;
extern int missing(void);
int fourth(void) { return missing(); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elf")
    (folder / "x.c").write_text(SOURCE)
    command = ["gcc", "-shared", "-fPIC", "-O0", "-o", str(folder / "x.so"), str(folder / "x.c")]
    subprocess.run(command, check=True)
    return folder / "x.so"


def by_binutils(library):
    """Addresses of the defined functions, and file offsets of the segments."""
    said = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", "--segments", str(library)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    words = [line.split() for line in said.splitlines()]
    loads = [(int(w[1], 16), int(w[2], 16), int(w[4], 16)) for w in words if w and w[0] == "LOAD"]
    found = {}
    for w in words:
        if len(w) == 8 and w[3] == "FUNC" and w[6] != "UND":
            address = int(w[1], 16)
            for offset, start, size in loads:
                if start <= address < start + size:
                    found[w[7]] = address - start + offset
    return found


def test_functions_of_a_library(library):
    found = function_offsets(library)
    assert found == by_binutils(library)
    assert {"first", "second", "second_v2", "third", "fourth"} <= set(found)
    assert not {"hidden", "internal", "variable", "missing"} & set(found)


def test_aliases_share_an_offset(library):
    found = function_offsets(library)
    assert found["second"] == found["second_v2"] != found["first"]


def test_the_offset_is_where_the_code_lies(library, tmp_path):
    """`first` begins with the same bytes as the disassembler shows at its address."""
    offset = function_offsets(library)["first"]
    code = library.read_bytes()[offset : offset + 4]
    said = subprocess.run(
        ["objdump", "-d", "--disassemble=first", str(library)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    lines = [line.split("\t") for line in said.splitlines() if line.count("\t") >= 1]
    shown = bytes.fromhex("".join(line[1].replace(" ", "") for line in lines))
    assert shown.startswith(code)


def test_a_stripped_library_keeps_them(library, tmp_path):
    stripped = tmp_path / "stripped.so"
    subprocess.run(["strip", "-o", str(stripped), str(library)], check=True)
    assert function_offsets(stripped) == function_offsets(library)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n" + b" " * 100,
        b"\x7fELF\x01\x01" + bytes(100),  # 32 bit
        b"\x7fELF\x02\x02" + bytes(100),  # big-endian
    ],
)
def test_what_is_no_library(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="is not a 64-bit little-endian ELF file"):
        function_offsets(tmp_path / "x")


@pytest.mark.parametrize("part", [64, 500, 0.3, 0.6, 0.9, 0.99])
def test_a_truncated_library_is_no_crash(library, tmp_path, part):
    whole = library.read_bytes()
    length = part if isinstance(part, int) else int(len(whole) * part)
    (tmp_path / "x").write_bytes(whole[:length])
    try:
        found = function_offsets(tmp_path / "x")
    except ValueError:
        return
    assert set(found) <= set(function_offsets(library))


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        function_offsets(tmp_path / "none")
