"""The simulated NVML through clients written elsewhere, against the simulation's own figures."""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pynvml
import pytest
from tests.simlab import CLIENT, CONTEXT_BYTES, MIB, ROOT, SIM, Process, SimLab

HEADER = ROOT / "build/sim/include/nvml/nvml.h"
BIN = Path(sys.executable).parent

# Runs nvidia-ml-py; `card` is the handle of the card that the first argument names.
PYNVML = """
import json, sys
import pynvml as n
n.nvmlInit()
card = n.nvmlDeviceGetHandleByIndex(int(sys.argv[1])) if len(sys.argv) > 1 else None
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return str(error)
"""

SPIN = """
import ctypes, sys
from cuda.bindings import driver as c
def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
ok(c.cuInit(0))
ok(c.cuCtxSetCurrent(ok(c.cuDevicePrimaryCtxRetain(ok(c.cuDeviceGet(0))))))
kernel = ok(c.cuModuleGetFunction(ok(c.cuModuleLoadData(b"any image")), b"spin_ns"))
for ms in map(int, sys.argv[1:]):
    ns = ((ms * 1000000,), (ctypes.c_uint64,))
    ok(c.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ns, 0))
ok(c.cuCtxSynchronize())
print('"done"', flush=True)
sys.stdin.read()
"""


def nvml(lab: SimLab, code: str, *arguments: object) -> Any:
    """The JSON that a program after PYNVML prints."""
    return json.loads(lab.python(PYNVML + code, *arguments))


@pytest.fixture
def used(lab: SimLab):
    """Three processes: two on card 0, the second of them on card 1 too."""
    with lab.client() as one, lab.client() as other:
        assert one.ask("alloc", 1000) == {"result": 0}
        assert other.ask("alloc", 500) == {"result": 0}
        assert other.ask("alloc", 77, 1) == {"result": 0}
        yield one.pid, other.pid


def expected(pids: Tuple[int, int]) -> List[Dict[int, int]]:
    one, other = pids
    return [
        {one: 1000 * MIB + CONTEXT_BYTES, other: 500 * MIB + CONTEXT_BYTES},
        {other: 77 * MIB + CONTEXT_BYTES},
    ]


def test_simulation_itself_counts_to_the_byte(lab: SimLab, used: Tuple[int, int]) -> None:
    for card, processes in zip(lab.status()["cards"], expected(used)):
        assert {p["pid"]: p["bytes"] for p in card["processes"]} == processes
        assert card["used_bytes"] == sum(processes.values())


def test_gpustat_agrees(lab: SimLab, used: Tuple[int, int]) -> None:
    done = subprocess.run(
        [str(BIN / "gpustat"), "--json"], env=lab.env, stdout=subprocess.PIPE, check=True
    )
    said = json.loads(done.stdout)
    assert said["driver_version"] == "580.95.05"
    for gpu, card, processes in zip(said["gpus"], lab.status()["cards"], expected(used)):
        assert gpu["name"] == card["name"]
        assert gpu["uuid"] == card["uuid"]
        assert gpu["memory.total"] == card["total_bytes"] // MIB
        assert gpu["memory.used"] == sum(processes.values()) // MIB
        assert {p["pid"]: p["gpu_memory_usage"] * MIB for p in gpu["processes"]} == processes


NVITOP = """
import json
from nvitop import Device
print(json.dumps([{
    "name": d.name(), "uuid": d.uuid(), "total": d.memory_total(), "used": d.memory_used(),
    "free": d.memory_free(), "bus_id": d.bus_id(), "gpu": d.gpu_utilization(),
    "processes": {p.pid: p.gpu_memory() for p in d.processes().values()},
    "driver": Device.driver_version(), "cuda": Device.cuda_driver_version(),
} for d in Device.all()]))
"""


def test_nvitop_agrees(lab: SimLab, used: Tuple[int, int]) -> None:
    for index, (gpu, card, processes) in enumerate(
        zip(json.loads(lab.python(NVITOP)), lab.status()["cards"], expected(used))
    ):
        assert gpu["name"] == card["name"]
        assert gpu["uuid"] == card["uuid"]
        assert gpu["total"] == card["total_bytes"]
        assert gpu["used"] == sum(processes.values())
        assert gpu["free"] == gpu["total"] - gpu["used"]
        assert {int(pid): held for pid, held in gpu["processes"].items()} == processes
        assert gpu["bus_id"] == f"00000000:1{index}:00.0"
        assert (gpu["driver"], gpu["cuda"]) == ("580.95.05", "13.0")


def test_nvitop_draws_its_screen(lab: SimLab, used: Tuple[int, int]) -> None:
    done = subprocess.run(
        [str(BIN / "nvitop"), "-1"],
        env=dict(lab.env, COLUMNS="120", LINES="50"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        text=True,
    )
    for pid in used:
        assert str(pid) in done.stdout
    assert "ERROR" not in done.stdout


def test_every_function_of_the_header_is_there(lab: SimLab) -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    declared = set(re.findall(r"DECLDIR\s+(?:char\s*\*\s*)?(nvml\w+)\s*\(", text))
    library = ctypes.CDLL(str(SIM / "libnvidia-ml.so.1"))
    assert len(declared) > 400
    assert [name for name in sorted(declared) if not hasattr(library, name)] == []


def test_every_function_of_nvidia_ml_py_is_there() -> None:
    source = Path(pynvml.__file__).read_text()
    wanted = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', source))
    library = ctypes.CDLL(str(SIM / "libnvidia-ml.so.1"))
    assert [name for name in sorted(wanted) if not hasattr(library, name)] == []


def test_memory_in_both_forms(lab: SimLab) -> None:
    lab = SimLab(_sub(lab, "reserving"), "[card0]\nmemory_mib = 1000\nreserved_mib = 100\n")
    with lab.client() as client:
        client.ask("alloc", 50)
        said = nvml(
            lab,
            """
a, b = n.nvmlDeviceGetMemoryInfo(card), n.nvmlDeviceGetMemoryInfo(card, n.nvmlMemory_v2)
print(json.dumps([[a.total, a.used, a.free], [b.total, b.reserved, b.used, b.free]]))
""",
            0,
        )
    held = 50 * MIB + CONTEXT_BYTES
    assert said[0] == [1000 * MIB, held + 100 * MIB, 900 * MIB - held]
    assert said[1] == [1000 * MIB, 100 * MIB, held, 900 * MIB - held]


def _sub(lab: SimLab, name: str) -> Path:
    folder = lab.folder / name
    folder.mkdir()
    return folder


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_process_lists_are_sized_by_negotiation(
    lab: SimLab, used: Tuple[int, int], version: str
) -> None:
    said = nvml(
        lab,
        """
from ctypes import *
version = sys.argv[2] if len(sys.argv) > 2 else ""
class Info(Structure):
    _fields_ = [("pid", c_uint), ("bytes", c_ulonglong)]
    if version:
        _fields_ += [("gpu", c_uint), ("compute", c_uint)]
get = n._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses" + version)
answers = []
for room in (0, 1, 2, 5):
    count, infos = c_uint(room), (Info * 5)()
    result = get(card, byref(count), infos if room else None)
    answers.append([result, count.value, sorted([i.pid, i.bytes] for i in infos if i.pid)])
print(json.dumps(answers))
""",
        0,
        *([version] if version else []),
    )
    whole = sorted([pid, held] for pid, held in expected(used)[0].items())
    too_small = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert said == [[too_small, 2, []], [too_small, 2, []], [0, 2, whole], [0, 2, whole]]


def test_other_lists_are_empty_and_details_agree(lab: SimLab, used: Tuple[int, int]) -> None:
    said = nvml(
        lab,
        """
details = n.nvmlDeviceGetRunningProcessDetailList
version = sizeof = __import__("ctypes").sizeof(n.c_nvmlProcessDetailList_v1_t) | 1 << 24
print(json.dumps([
    n.nvmlDeviceGetGraphicsRunningProcesses(card), n.nvmlDeviceGetMPSComputeRunningProcesses(card),
    sorted([p.pid, p.usedGpuMemory] for p in details(card, version, n.NVML_PROCESS_MODE_COMPUTE)),
    details(card, version, n.NVML_PROCESS_MODE_MPS),
]))
""",
        0,
    )
    assert said == [[], [], sorted([p, held] for p, held in expected(used)[0].items()), []]


def test_handles_by_every_name(lab: SimLab) -> None:
    said = nvml(
        lab,
        """
found = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    by = [n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h)),
          n.nvmlDeviceGetHandleBySerial(n.nvmlDeviceGetSerial(h)),
          n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo(h).busId),
          n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo(h).busIdLegacy)]
    found.append([n.nvmlDeviceGetIndex(x) for x in by] + [n.nvmlDeviceGetMinorNumber(h)])
print(json.dumps([found, attempt(n.nvmlDeviceGetHandleByUUID, "GPU-none"),
                  attempt(n.nvmlDeviceGetHandleByIndex, 2)]))
""",
    )
    assert said == [[[0] * 5, [1] * 5], "Not Found", "Invalid Argument"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [("lost", "GPU is lost"), ("unknown", "Unknown Error"), ("timeout", "Timeout")],
)
def test_a_fault_hits_the_figures_of_one_card(lab: SimLab, fault: str, error: str) -> None:
    code = """
import subprocess
lists = ["Compute", "Graphics", "MPSCompute"]
def read(h):
    calls = [n.nvmlDeviceGetMemoryInfo, n.nvmlDeviceGetUtilizationRates, n.nvmlDeviceGetPowerUsage]
    calls += [getattr(n, f"nvmlDeviceGet{kind}RunningProcesses") for kind in lists]
    return [x if isinstance(x := attempt(call, h), str) else "fine" for call in calls]
other = n.nvmlDeviceGetHandleByIndex(1)
before = read(card)
subprocess.run([sys.argv[2], "fault", "0", sys.argv[3]], check=True)
print(json.dumps([before, read(card), read(other), n.nvmlDeviceGetName(card)]))
"""
    said = nvml(lab, code, 0, SIM / "mgpu-sim", fault)
    fine = ["fine"] * 6
    assert said == [fine, [error] * 6, fine, "NVIDIA H200 (simulated)"]
    after = nvml(
        lab, "print(json.dumps(attempt(n.nvmlDeviceGetHandleByIndex, 0).__class__ is str))"
    )
    assert after is (fault == "lost")  # a lost card has no new handle
    lab.fault(0, "none")
    assert nvml(lab, "print(json.dumps(read(card)))".replace("read", "n.nvmlDeviceGetName"), 0)


def test_losing_a_card_is_an_event(lab: SimLab) -> None:
    code = """
import subprocess
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(card, n.nvmlEventTypeXidCriticalError, events)
quiet = attempt(n.nvmlEventSetWait_v2, events, 0)
subprocess.run([sys.argv[2], "fault", "0", "lost"], check=True)
event = n.nvmlEventSetWait_v2(events, 5000)
again = attempt(n.nvmlEventSetWait_v2, events, 0)
n.nvmlEventSetFree(events)
print(json.dumps([quiet, event.eventType, event.eventData, again]))
"""
    said = nvml(lab, code, 0, SIM / "mgpu-sim")
    assert said == ["Timeout", pynvml.nvmlEventTypeXidCriticalError, 79, "Timeout"]


def test_use_before_and_after_initialisation(lab: SimLab) -> None:
    code = """
n.nvmlShutdown()
calls = [n.nvmlDeviceGetCount, n.nvmlSystemGetDriverVersion, n.nvmlShutdown]
calls += [lambda: n.nvmlDeviceGetName(card), lambda: n.nvmlDeviceGetVgpuMetadata(card)]
off = [attempt(call) for call in calls]
n.nvmlInit(); n.nvmlInit(); n.nvmlShutdown()
print(json.dumps([off, n.nvmlDeviceGetCount(), attempt(n.nvmlDeviceGetMigMode, card)]))
"""
    assert nvml(lab, code, 0) == [["Uninitialized"] * 5, 2, "Not Supported"]


def test_only_cards_whose_node_can_be_opened_are_listed(lab: SimLab) -> None:
    (lab.nodes / "nvidia0").unlink()
    (lab.nodes / "nvidia0").symlink_to("nvidia0")  # not to be opened by anybody
    code = "print(json.dumps([n.nvmlDeviceGetName(n.nvmlDeviceGetHandleByIndex(i))"
    assert nvml(lab, code + " for i in range(n.nvmlDeviceGetCount())]))") == [
        "NVIDIA A10 (simulated)"
    ]


def test_utilisation_by_process_adds_up_to_the_time_asked_for(lab: SimLab) -> None:
    """600 ms of kernels: 600 ms in samples of 1/6 s of that process, each at most 100 percent."""
    with Process([sys.executable, "-c", SPIN, "200", "400"], lab.env) as process:
        assert process.read() == "done"
        code = """
import time
time.sleep(1 / 6)  # the period in which the work ended has to end itself
samples = n.nvmlDeviceGetProcessUtilization(card, 0)
_, whole = n.nvmlDeviceGetSamples(card, n.NVML_GPU_UTILIZATION_SAMPLES, 0)
print(json.dumps([[[s.pid, s.smUtil, s.timeStamp] for s in samples],
                  [s.sampleValue.uiVal for s in whole]]))
"""
        by_process, whole = nvml(lab, code, 0)
    assert {pid for pid, _, _ in by_process} == {process.pid}
    assert all(0 < percent <= 100 for _, percent, _ in by_process)
    busy_ms = sum(percent for _, percent, _ in by_process) / 100 * 1000 / 6
    assert abs(busy_ms - 600) <= len(by_process) * 1000 / 6 / 100  # rounded to whole percents
    assert sum(whole) == sum(percent for _, percent, _ in by_process)
    times = [time_us for _, _, time_us in by_process]
    assert all(abs(b - a - 1e6 / 6) < 1000 for a, b in zip(times, times[1:]))


def test_an_idle_card_has_no_samples_of_processes(lab: SimLab) -> None:
    code = "print(json.dumps([attempt(n.nvmlDeviceGetProcessUtilization, card, 0),"
    assert nvml(lab, code + " n.nvmlDeviceGetUtilizationRates(card).gpu]))", 0) == ["Not Found", 0]


NAMESPACES = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]


def can_unshare() -> bool:
    return subprocess.run([*NAMESPACES, "true"], stderr=subprocess.DEVNULL).returncode == 0


# Started as the first process of a PID namespace: a client of its own, then NVML's list.
INSIDE = (
    PYNVML
    + """
import subprocess
child = subprocess.Popen([sys.executable, sys.argv[2]], stdin=-1, stdout=-1, text=True)
child.stdout.readline()
print("alloc 20", file=child.stdin, flush=True)
child.stdout.readline()
listed = [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(card)]
print(json.dumps([child.pid, listed, n.nvmlDeviceGetMemoryInfo(card).used]), flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""
)


@pytest.mark.skipif(not can_unshare(), reason="no PID namespaces (CAP_SYS_ADMIN)")
def test_pids_are_those_of_the_readers_namespace(lab: SimLab) -> None:
    """The host sees everybody by its own PIDs; a namespace only its members, by theirs."""
    command = [*NAMESPACES, sys.executable, "-c", INSIDE, "0", str(CLIENT)]
    with lab.client() as outside:
        assert outside.ask("alloc", 10) == {"result": 0}
        with Process(command, lab.env) as inside:
            pid_inside, listed, used_bytes = inside.read()
            assert listed == [[pid_inside, 20 * MIB + CONTEXT_BYTES]]
            assert used_bytes == 30 * MIB + 2 * CONTEXT_BYTES
            by_host = {p["pid"]: p["bytes"] for p in lab.status()["cards"][0]["processes"]}
            assert by_host.pop(outside.pid) == 10 * MIB + CONTEXT_BYTES
            ((host_pid, held),) = by_host.items()
            assert held == 20 * MIB + CONTEXT_BYTES
            status = Path(f"/proc/{host_pid}/status").read_text()
            assert re.search(rf"^NSpid:\s+{host_pid}\s+{pid_inside}$", status, re.MULTILINE)


def test_death_by_sigkill_gives_everything_back(lab: SimLab) -> None:
    with lab.client() as client:
        client.ask("alloc", 100)
        assert lab.bytes_of(client.pid) == 100 * MIB + CONTEXT_BYTES
        client.kill()
        card = lab.status()["cards"][0]
        assert (card["used_bytes"], card["processes"]) == (0, [])
