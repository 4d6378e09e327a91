"""Small device programs, by raw instructions, and processes that try to open nodes."""

import ctypes
import os
import stat
import struct

from mgpu import bpf

PROG_LOAD = 5
TYPE_CGROUP_DEVICE = 15


def _instruction(code, dst=0, src=0, offset=0, value=0):
    return struct.pack("<BBhi", code, src << 4 | dst, offset, value)


def load(name, major=None):
    """A program that refuses ``major`` and nothing else; its descriptor."""
    mov, exit_ = 0xB7, 0x95
    code = [_instruction(mov, dst=0, value=1), _instruction(exit_)]
    if major is not None:
        code = [
            _instruction(0x61, dst=2, src=1, offset=4),  # r2 = ctx->major
            _instruction(mov, dst=0, value=1),
            _instruction(0x55, dst=2, offset=1, value=major),  # if r2 != major: skip one
            _instruction(mov, dst=0, value=0),
            _instruction(exit_),
        ]
    text = ctypes.create_string_buffer(b"".join(code))
    license_ = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "<IIQQIIQII16s",
        TYPE_CGROUP_DEVICE,
        len(code),
        ctypes.addressof(text),
        ctypes.addressof(license_),
        0,
        0,
        0,
        0,
        0,
        name.encode(),
    )
    return bpf._bpf(PROG_LOAD, bytearray(attr.ljust(128, b"\0")))


def open_in(cgroups, cgroup, major, minor, folder):
    """The errno (0: opened) of opening a node that a process in ``cgroup`` makes itself."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            cgroups.add(cgroup, os.getpid())
            os.write(writer, b"%d" % _try(major, minor, folder))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return int(text)


def _try(major, minor, folder):
    path = os.path.join(str(folder), f"node-{major}-{minor}-{os.getpid()}")
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return error.errno
    finally:
        if os.path.lexists(path):
            os.unlink(path)
    return 0
