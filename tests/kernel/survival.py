"""What the tests of survival share: maps read while no agent runs, agents that die on the way."""

import os
import struct
import subprocess
import sys

from tests.lab import BIN, MIB, wait_for

from mgpu import bpf
from mgpu.probes.tables import Tables

# Runs the agent with something of it replaced: the code given comes first.
PATCHED = """
import os, sys
from mgpu import bpf, daemon
from mgpu.probes import attachments, cuda, layout, loader, slots
def die(*_):
    os.kill(os.getpid(), 9)
def die_at(owner, name, count):
    real, calls = getattr(owner, name), []
    def counting(*a, **k):
        calls.append(1)
        return die() if len(calls) == count else real(*a, **k)
    setattr(owner, name, counting)
"""


class Pins:
    """The maps of an agent, for Tables; also when it does not run."""

    def __init__(self, bpf_root):
        self._root = bpf_root

    def map(self, name):
        (path,) = self._root.glob(f"*/maps/{name}")
        return bpf.Map.pinned(path)


def tracked(node):
    """Bytes counted, by PID."""
    found = {}
    for (pid, _), nbytes in Tables(Pins(node.bpf_root)).tracked().items():
        found[pid] = found.get(pid, 0) + nbytes
    return {pid: nbytes for pid, nbytes in found.items() if nbytes}


def patched(node, code):
    """The command of an agent with ``code`` run before it."""
    script = PATCHED + code + "\nsys.exit(daemon.main(sys.argv[1:]))"
    return [str(BIN / "python"), "-c", script, "--config", str(node.config), "run"]


def run_patched(node, code):
    """Run such an agent to its end; its exit status (-9: killed) and what it said."""
    done = subprocess.run(
        patched(node, code),
        env=node.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    sys.stdout.write(done.stdout)
    return done.returncode, done.stdout


def program_ids(node, name):
    """Ids of the pinned programs called ``name``."""
    found = []
    for path in node.bpf_root.glob(f"*/programs/*/{name}"):
        fd = bpf.obj_get(path)
        found.append(bpf.program_info(fd).program_id)
        os.close(fd)
    return found


def is_gone(program_id):
    try:
        os.close(bpf.prog_by_id(program_id))
    except FileNotFoundError:
        return True
    return False


def slots_id(node):
    """The id of the array that probes jump into."""
    (path,) = node.bpf_root.glob("*/maps/probe_slots")
    held = bpf.Map.pinned(path)
    try:
        return held.info.map_id
    finally:
        held.close()


def no_probe_left(map_id):
    """Whether nothing attached refers to that array any more: it is freed only then.

    A descriptor of it is never opened: to close the last one sets off work that holds the array.
    """
    map_get_next_id = 12

    def gone():
        attr = bytearray(struct.pack("<III", map_id - 1, 0, 0))
        try:
            bpf._bpf(map_get_next_id, attr)
        except FileNotFoundError:
            return True
        return struct.unpack_from("<III", attr)[1] != map_id

    return wait_for(gone, 60)  # 0.1 s for each probe


def used_mib(node):
    (row,) = node.containers()
    return row["vmem_info"]["used_bytes"] / MIB
