"""Memory shared between processes on the simulated card: whose it is, and that it is the same."""

import os
import subprocess
import sys

import pytest
from tests.simlab import BEGIN, CONTEXT_BYTES, MIB, SIM, Process, SimLab

IMPORTER = """
line = sys.stdin.readline().split()
handle = c.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(line[0]), 64)
at = ok(c.cuIpcOpenMemHandle(handle, 1))
say(held())
sys.stdin.readline()
say(held())
ok(c.cuIpcCloseMemHandle(at))
say(held())
sys.stdin.read()
"""
EXPORTER = """
it = ok(c.cuMemAlloc(3 * MIB))
handle = ok(c.cuIpcGetMemHandle(it))
say(ctypes.string_at(handle.getPtr(), 64).hex())
sys.stdin.readline()
if sys.argv[1] == "free":
    ok(c.cuMemFree(it))
say(held())
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["free", "kill"])
def test_ipc_memory_is_the_owners_until_it_goes(lab: SimLab, end: str) -> None:
    with lab.start(EXPORTER, end) as owner:
        handle = owner.read()
        with lab.start(IMPORTER) as importer:
            assert importer.ask(handle) == 0
            assert lab.bytes_of(owner.pid) == 3 * MIB + CONTEXT_BYTES
            if end == "free":
                assert owner.ask("go") == 0
            else:
                owner.kill()
            assert importer.ask("go") == 3 * MIB  # now it is the importer's
            assert importer.read() == 0
        if end == "free":
            assert lab.bytes_of(owner.pid) == CONTEXT_BYTES


def test_ipc_import_costs_the_importer_nothing_while_the_owner_lives(lab: SimLab) -> None:
    with lab.start(EXPORTER, "keep") as owner:
        handle = owner.read()
        with lab.start(IMPORTER) as importer:
            assert importer.ask(handle) == 0
            importer.kill()
        assert owner.ask("go") == 3 * MIB
    assert lab.status()["cards"][0]["used_bytes"] == 0


OPEN = """
def handle_of(text):
    handle = c.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), bytes.fromhex(text), 64)
    return handle
"""


def test_both_sides_see_the_same_content(lab: SimLab) -> None:
    export = """
it = ok(c.cuMemAlloc(5000))
ok(c.cuMemsetD8(it, 65, 5000))
say(ctypes.string_at(ok(c.cuIpcGetMemHandle(it)).getPtr(), 64).hex())
sys.stdin.readline()
back = bytearray(2)
ok(c.cuMemcpyDtoH(back, int(it) + 4998, 2))
say(back.decode())
sys.stdin.read()
"""
    look = (
        OPEN
        + """
at = ok(c.cuIpcOpenMemHandle(handle_of(sys.argv[1]), 1))
back = bytearray(2)
ok(c.cuMemcpyDtoH(back, int(at) + 4998, 2))
ok(c.cuMemsetD8(int(at) + 4999, 66, 1))
ok(c.cuIpcCloseMemHandle(at))
say(back.decode())
"""
    )
    with lab.start(export) as owner:
        assert lab.cuda(look, owner.read()) == "AA"
        assert owner.ask("go") == "AB"
    assert lab.status()["cards"][0]["used_bytes"] == 0
    with lab.client():  # who comes next clears up
        assert [path.name for path in lab.folder.glob("mem.*")] == []


def test_opened_twice_it_is_at_one_address_and_closed_twice(lab: SimLab) -> None:
    twice = (
        OPEN
        + """
a, b = [ok(c.cuIpcOpenMemHandle(handle_of(sys.argv[1]), 1)) for _ in "ab"]
say(int(a) == int(b), [int(c.cuIpcCloseMemHandle(a)[0]) for _ in range(3)])
"""
    )
    with lab.start(EXPORTER, "keep") as owner:
        assert lab.cuda(twice, owner.read()) == [True, [0, 0, 1]]


def test_own_and_unknown_handles_are_refused(lab: SimLab) -> None:
    said = lab.cuda(
        """
own = ok(c.cuIpcGetMemHandle(ok(c.cuMemAlloc(10))))
unknown = c.CUipcMemHandle()
ctypes.memset(unknown.getPtr(), 7, 64)
pooled = ok(c.cuMemAllocAsync(10, 0))
say([int(a[0]) for a in (c.cuIpcOpenMemHandle(own, 1), c.cuIpcOpenMemHandle(unknown, 1),
                         c.cuIpcOpenMemHandle(own, 0), c.cuIpcGetMemHandle(pooled),
                         c.cuIpcGetMemHandle(0x1234), c.cuIpcCloseMemHandle(pooled))])
"""
    )
    invalid_value, invalid_context, invalid_handle = 1, 201, 400
    assert said == [invalid_context, invalid_handle] + [invalid_value] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_processes_with_the_same_pid_in_other_namespaces(lab: SimLab) -> None:
    """Both sides are PID 1 of their namespace; each is known by its PID here outside."""
    env = {**lab.env, "MGPU_SIM": str(SIM / "mgpu-sim")}
    apart = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    whoami = "say(os.getpid())\n"
    with Process([*apart, BEGIN + whoami + EXPORTER, "keep"], env) as owner:
        assert owner.read() == 1
        handle = owner.read()
        with Process([*apart, BEGIN + whoami + IMPORTER], env) as importer:
            assert importer.read() == 1
            assert importer.ask(handle) == 0
            outside = {p["pid"]: p["bytes"] for p in lab.status()["cards"][0]["processes"]}
            children = {
                child_of(owner.pid): 3 * MIB + CONTEXT_BYTES,
                child_of(importer.pid): CONTEXT_BYTES,
            }
            assert outside == children


def child_of(pid: int) -> int:
    done = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, check=True, text=True)
    return int(done.stdout)
