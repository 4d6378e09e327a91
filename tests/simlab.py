"""The simulated cards alone, for tests that need neither root nor an agent.

The device nodes are plain files of a folder of the lab's own: whoever may open them has the card.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

ROOT = Path(__file__).resolve().parents[1]
SIM = ROOT / "build/sim"
CLIENT = Path(__file__).with_name("client.py")
MIB = 1024 * 1024
CONTEXT_BYTES = 256 * MIB  # context_mib of the simulation, unless sim.conf says otherwise

# How programs on NVIDIA's Python binding begin in tests. `held` is what this process holds on a
# card beyond its contexts; every answer is JSON.
BEGIN = """
import ctypes, json, os, subprocess, sys
from cuda.bindings import driver as c
MIB = 1 << 20
def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:] if len(answer) > 2 else None
def held(card=0, contexts=1):
    status = json.loads(subprocess.check_output([os.environ["MGPU_SIM"], "status", "--json"]))
    mine = [p for p in status["cards"][card]["processes"] if p["pid"] == os.getpid()]
    return sum(p["bytes"] for p in mine) - contexts * 256 * MIB
def say(*values):
    print(json.dumps(values[0] if len(values) == 1 else values), flush=True)
ok(c.cuInit(0))
device = ok(c.cuDeviceGet(0))
primary = ok(c.cuDevicePrimaryCtxRetain(device))
ok(c.cuCtxSetCurrent(primary))
"""

KERNEL = """
kernel = ok(c.cuModuleGetFunction(ok(c.cuModuleLoadData(b"any image")), b"spin_ns"))
def launch(ms, stream=0):
    ok(c.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream,
                        ((int(ms * 1000000),), (ctypes.c_uint64,)), 0))
"""

# Descriptors and properties, for the calls that want some.
MAKERS = """
FLOAT, HALF, BYTE = (getattr(c.CUarray_format, "CU_AD_FORMAT_" + n)
                     for n in ("FLOAT", "HALF", "UNSIGNED_INT8"))
LAYERED = 1
def flat(width, height, form, channels):
    it = c.CUDA_ARRAY_DESCRIPTOR()
    it.Width, it.Height, it.Format, it.NumChannels = width, height, form, channels
    return it
def solid(width, height, depth, form, channels, flags=0):
    it = c.CUDA_ARRAY3D_DESCRIPTOR()
    it.Width, it.Height, it.Depth, it.Format, it.NumChannels = width, height, depth, form, channels
    it.Flags = flags
    return it
properties = c.CUmemAllocationProp()
properties.type = c.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type = c.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
properties.location.id = 0
pool_properties = c.CUmemPoolProps()
pool_properties.allocType = c.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
pool_properties.location.type = c.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
pool_properties.location.id = 0
pool = ok(c.cuMemPoolCreate(pool_properties))
"""


class Process:
    """A program on the simulation, spoken to by lines, answering by lines of JSON."""

    def __init__(self, command: List[str], env: Dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.popen.pid

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def read(self) -> Any:
        assert self.popen.stdout
        return json.loads(self.popen.stdout.readline())

    def ask(self, *words: object) -> Any:
        assert self.popen.stdin
        print(*words, file=self.popen.stdin, flush=True)
        return self.read()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()


class SimLab:
    """One simulation in a folder of its own. ``conf`` is the text of sim.conf after [sim]."""

    def __init__(self, folder: Path, conf: str = "") -> None:
        self.folder = folder
        self.nodes = folder / "dev"
        self.nodes.mkdir()
        (folder / "sim.conf").write_text(f"[sim]\ndev_root = {self.nodes}\n{conf}")
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(SIM),
            "MGPU_SIM_DIR": str(folder),
        }
        self.env.pop("CUDA_VISIBLE_DEVICES", None)
        for card in self.status()["cards"]:
            (self.nodes / f"nvidia{card['minor']}").touch()

    def sim(self, *words: object) -> str:
        """mgpu-sim: the simulation's own command line."""
        done = subprocess.run(
            [str(SIM / "mgpu-sim"), *map(str, words)],
            env=self.env,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return done.stdout

    def status(self) -> Dict[str, Any]:
        status: Dict[str, Any] = json.loads(self.sim("status", "--json"))
        return status

    def bytes_of(self, pid: int, card: int = 0) -> int:
        """What the simulation says that a process holds on a card."""
        processes = self.status()["cards"][card]["processes"]
        return sum(process["bytes"] for process in processes if process["pid"] == pid)

    def fault(self, card: int, fault: str) -> None:
        self.sim("fault", card, fault)

    def client(self) -> Process:
        """tests/client.py: NVIDIA's Python binding; ``alloc MIB [DEVICE]`` and so on."""
        process = Process([sys.executable, str(CLIENT)], self.env)
        assert process.read() == {"init": 0}
        return process

    def start(self, code: str, *arguments: object) -> Process:
        """A CUDA program (after BEGIN) as a process to speak to."""
        command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
        return Process(command, {**self.env, "MGPU_SIM": str(SIM / "mgpu-sim")})

    def cuda(self, code: str, *arguments: object, **env: str) -> Any:
        """The JSON that a CUDA program (after BEGIN) prints."""
        env["MGPU_SIM"] = str(SIM / "mgpu-sim")
        return json.loads(self.python(BEGIN + code, *arguments, **env))

    def python(self, code: str, *arguments: object, **env: str) -> str:
        """What a Python program on the simulation prints."""
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return done.stdout
