"""The simulation's shared state: its configuration, its command line, and death at any moment."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Optional

import pytest
from tests.simlab import CONTEXT_BYTES, KERNEL, MIB, SIM, Process, SimLab

CONF = """context_mib = 64
driver_version = 570.10
cuda_version = 12.8
[card0]
name = NVIDIA L4
uuid = GPU-11111111-2222-3333-4444-555555555555
memory_mib = 23034
reserved_mib = 400
minor = 5
[card1]
[card2]
memory_mib = 100
"""


def test_cards_are_configurable(tmp_path: Path) -> None:
    status = SimLab(tmp_path, CONF).status()
    assert status["driver_version"] == "570.10"
    first, second, third = status["cards"]
    assert first["name"] == "NVIDIA L4 (simulated)"  # it always says so
    assert first["uuid"] == "GPU-11111111-2222-3333-4444-555555555555"
    assert (first["total_bytes"], first["reserved_bytes"]) == (23034 * MIB, 400 * MIB)
    assert (first["minor"], second["minor"], third["minor"]) == (5, 1, 2)
    assert second["total_bytes"] == 23028 * MIB
    assert third["total_bytes"] == 100 * MIB


@pytest.mark.parametrize(
    "line",
    [
        "colour = red",
        "nonsense",
        "[card7]",
        "[card0]x",
        "context_mib = many",
        "context_mib = -1",
        "context_mib = 99999999999999999999",
        "cuda_version = new",
        "preempt = maybe",
    ],
)
def test_a_line_that_means_nothing_is_named(tmp_path: Path, line: str) -> None:
    lab = SimLab(tmp_path)
    (tmp_path / "sim.conf").write_text(f"[sim]\n{line}\n")
    done = subprocess.run(
        [str(SIM / "mgpu-sim"), "status"], env=lab.env, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    assert "sim.conf line 2" in done.stderr


def test_values_of_a_card_that_mean_nothing_are_named(tmp_path: Path) -> None:
    lab = SimLab(tmp_path)
    for line in ("memory_mib = 1.5", "memory_mib =", "minor = 255", "reserved_mib = 999999"):
        (tmp_path / "sim.conf").write_text(f"[card0]\n{line}\n")
        done = subprocess.run(
            [str(SIM / "mgpu-sim"), "status"], env=lab.env, stderr=subprocess.PIPE, text=True
        )
        assert (done.returncode, "sim.conf" in done.stderr) == (1, True)


def test_names_of_any_kind_are_shown_as_they_are(tmp_path: Path) -> None:
    status = SimLab(tmp_path, '[card0]\nname = The "best"\\card\n').status()
    assert status["cards"][0]["name"] == 'The "best"\\card (simulated)'


@pytest.mark.parametrize("size", [0, 5, 1_000_000, None])
def test_a_state_file_of_another_kind_is_made_anew(tmp_path: Path, size: Optional[int]) -> None:
    """None: of the right size, but never made to its end."""
    lab = SimLab(tmp_path)
    state = tmp_path / "state"
    right = state.stat().st_size
    state.unlink()
    with state.open("wb") as file:
        file.truncate(right if size is None else size)
    with lab.client() as client:
        assert client.ask("alloc", 1) == {"result": 0}
        assert len(lab.status()["cards"][0]["processes"]) == 1


@pytest.mark.parametrize(
    "words", [["fault", "9", "lost"], ["fault", "0", "tired"], ["fault"], ["dance"], []]
)
def test_wrong_command_lines(lab: SimLab, words: list) -> None:
    done = subprocess.run([str(SIM / "mgpu-sim"), *words], env=lab.env, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert b"usage:" in done.stderr


def test_faults_are_shown_and_reset(lab: SimLab) -> None:
    lab.fault(1, "unknown")
    assert [card["fault"] for card in lab.status()["cards"]] == ["none", "unknown"]
    lab.sim("reset")
    assert [card["fault"] for card in lab.status()["cards"]] == ["none", "none"]


# Threads that keep every part of the shared state moving, with its mutex taken most of the time.
RESTLESS = (
    KERNEL
    + """
import threading
def allocate():
    ok(c.cuCtxSetCurrent(primary))
    while True:
        it = ok(c.cuMemAlloc(1 << 20))
        c.cuIpcGetMemHandle(it)
        ok(c.cuMemFree(it))
def work():
    ok(c.cuCtxSetCurrent(primary))
    while True:
        launch(0)
        c.cuStreamQuery(0)
for target in (allocate, work, work):
    threading.Thread(target=target, daemon=True).start()
say("restless")
sys.stdin.read()
"""
)


def restless(lab: SimLab) -> Process:
    process = lab.start(RESTLESS)
    assert process.read() == "restless"
    return process


def test_sigkill_at_any_moment_leaves_nothing_behind(lab: SimLab) -> None:
    for round_number in range(5):
        processes = [restless(lab) for _ in range(3)]
        time.sleep(0.01 * round_number)  # some of them die inside the mutex, wherever they are
        for process in processes:
            process.kill()
    for card in lab.status()["cards"]:
        assert (card["used_bytes"], card["processes"]) == (0, [])
    with lab.client() as client:
        assert client.ask("alloc", 100) == {"result": 0}


def test_a_stopped_process_keeps_nobody_from_memory_or_figures(lab: SimLab) -> None:
    """Wherever it was stopped: under no lock that an allocation or NVML's figures need."""
    with lab.client() as client:
        assert client.ask("alloc", 1) == {"result": 0}
        for _ in range(5):
            with restless(lab) as process:
                process.popen.send_signal(signal.SIGSTOP)
                assert client.ask("alloc", 1) == {"result": 0}
                assert client.ask("free") == {"result": 0}
                lab.python(
                    "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
                    "n.nvmlDeviceGetMemoryInfo(h); n.nvmlDeviceGetUtilizationRates(h);"
                    "n.nvmlDeviceGetComputeRunningProcesses(h)"
                )


def test_a_process_with_both_libraries_sees_itself(lab: SimLab) -> None:
    """Each has its own view of the state; one must not take the other's locks for none."""
    said = lab.cuda(
        """
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
ok(c.cuMemAlloc(5))
say([[p.pid == os.getpid(), p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    n.nvmlDeviceGetMemoryInfo(h).used)
"""
    )
    assert said == [[[True, CONTEXT_BYTES + 5]], CONTEXT_BYTES + 5]


def test_nvml_works_in_a_child_of_a_cuda_process(lab: SimLab) -> None:
    said = lab.cuda(
        """
import pynvml as n
n.nvmlInit()
if os.fork() == 0:
    h = n.nvmlDeviceGetHandleByIndex(0)
    say([p.pid == os.getppid() for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        n.nvmlDeviceGetUtilizationRates(h).gpu)
    os._exit(0)
os.wait()
"""
    )
    assert said == [[True], 0]


def test_status_is_of_one_moment(lab: SimLab) -> None:
    """The sum over processes is what is in use, at any moment; a process that moves memory from one
    card to the other, never holding it twice, is never seen with it twice."""
    code = """
two = ok(c.cuDevicePrimaryCtxRetain(1))
say(1)
while True:
    for context in primary, two:
        ok(c.cuCtxSetCurrent(context))
        ok(c.cuMemFree(ok(c.cuMemAlloc(1 << 30))))
"""
    with lab.start(code) as one, lab.start(code) as two:
        assert [one.read(), two.read()] == [1, 1]
        for _ in range(50):
            status = lab.status()
            assert status["settled"]
            for card in status["cards"]:
                assert sum(p["bytes"] for p in card["processes"]) == card["used_bytes"]
            for process in (one, two):
                held = sum(
                    p["bytes"]
                    for card in status["cards"]
                    for p in card["processes"]
                    if p["pid"] == process.pid
                )
                assert held - 2 * CONTEXT_BYTES in (0, 1 << 30)


def test_slots_and_contexts_of_the_dead_are_used_again(lab: SimLab) -> None:
    for _ in range(10):
        with lab.client() as client:
            assert client.ask("alloc", 1) == {"result": 0}
    assert lab.status()["cards"][0]["processes"] == []
