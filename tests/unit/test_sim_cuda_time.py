"""How the simulated cards spend their time. All times are the card's own, told by events."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.simlab import KERNEL, SimLab

# A second context on the card; events to be recorded behind work that keeps it busy long enough for
# the rest to be queued.
TWO = (
    KERNEL
    + """
other = ok(c.cuCtxCreate(None, 0, device))
def use(context):
    ok(c.cuCtxSetCurrent(context))
def mark():
    event = ok(c.cuEventCreate(0))
    ok(c.cuEventRecord(event, 0))
    return event
def elapsed(a, b):
    ok(c.cuEventSynchronize(a))
    ok(c.cuEventSynchronize(b))
    return ok(c.cuEventElapsedTime(a, b))
"""
)


def test_events_measure_the_cards_time(lab: SimLab) -> None:
    said = lab.cuda(
        KERNEL
        + """
stream, (a, b) = ok(c.cuStreamCreate(1)), [ok(c.cuEventCreate(0)) for _ in "ab"]
launch(400, stream)  # time enough to queue the rest behind it
ok(c.cuEventRecord(a, stream))
launch(30, stream)
launch(20, stream)
ok(c.cuEventRecord(b, stream))
busy = int(c.cuStreamQuery(stream)[0])
ok(c.cuEventSynchronize(b))
say(busy, ok(c.cuEventElapsedTime(a, b)), int(c.cuStreamQuery(stream)[0]),
    int(c.cuModuleGetFunction(ok(c.cuModuleLoadData(b"x")), b"other")[0]))
""",
    )
    busy, elapsed_ms, idle, unknown = said
    assert (busy, idle, unknown) == (600, 0, 500)
    assert elapsed_ms == pytest.approx(50, abs=0.001)


def test_contexts_take_turns(lab: SimLab) -> None:
    """60 kernels of 1 ms take 120 ms beside a context that has as many all the time."""
    elapsed_ms = lab.cuda(
        TWO
        + """
use(primary)
for _ in range(600): launch(1)
use(other)
for _ in range(200): launch(1)
a = mark()
for _ in range(60): launch(1)
say(elapsed(a, mark()))
"""
    )
    assert elapsed_ms == pytest.approx(120, abs=4.1)  # of each context a slice, 2 ms, may miss


def test_a_kernel_is_not_interrupted(lab: SimLab) -> None:
    """A kernel of 1 ms waits for the other context's 600 ms to end."""
    elapsed_ms = lab.cuda(
        TWO
        + """
use(primary); launch(600); a = mark()
use(other); launch(1)
say(elapsed(a, mark()))
"""
    )
    assert elapsed_ms == pytest.approx(1, abs=0.001)


def test_a_kernel_is_interrupted_where_the_card_can(tmp_path: Path) -> None:
    """20 ms of work are through long before the end of a kernel of 600 ms that ran already."""
    lab = SimLab(tmp_path, "preempt = yes\n")
    elapsed_ms = lab.cuda(
        TWO
        + """
use(primary); launch(600); a = mark()
use(other); launch(20)
say(elapsed(a, mark()))
"""
    )
    # the longer one ends at 620; the shorter takes 40 from when it was launched, soon after
    assert -600 < elapsed_ms < -60


def test_long_kernels_take_more_than_short_ones(lab: SimLab) -> None:
    """Turns end between kernels: 20 ms against two of 1 ms."""
    elapsed_ms = lab.cuda(
        TWO
        + """
use(primary)
for _ in range(40): launch(20)
use(other)
for _ in range(20): launch(1)
a = mark()
for _ in range(10): launch(1)
say(elapsed(a, mark()))
"""
    )
    assert elapsed_ms == pytest.approx(5 * 20 + 10, abs=22.1)


def test_a_queue_takes_1024_launches_and_then_waits_for_the_first(lab: SimLab) -> None:
    said = lab.cuda(
        TWO
        + """
use(primary); launch(1500); first = mark()
for _ in range(1023): launch(0.001)
before = int(c.cuEventQuery(first)[0])
launch(0.001)
say(before, int(c.cuEventQuery(first)[0]))
"""
    )
    assert said == [600, 0]


def test_a_stream_waits_for_its_own_work_only(lab: SimLab) -> None:
    said = lab.cuda(
        KERNEL
        + """
one, two = ok(c.cuStreamCreate(1)), ok(c.cuStreamCreate(1))
launch(5, one)
launch(600, two)
ok(c.cuStreamSynchronize(one))
busy = int(c.cuStreamQuery(two)[0])
ok(c.cuCtxSynchronize())
say(busy, int(c.cuStreamQuery(two)[0]))
"""
    )
    assert said == [600, 0]


def test_kernels_of_a_library_can_be_launched(lab: SimLab) -> None:
    said = lab.cuda(
        TWO
        + """
library = ok(c.cuLibraryLoadData(b"any code", None, None, 0, None, None, 0))
use(primary); launch(400); a = mark()
kernel = ok(c.cuKernelGetFunction(ok(c.cuLibraryGetKernel(library, b"spin_ns"))))
name = ok(c.cuFuncGetName(kernel)).decode()
launch(7)
ms = elapsed(a, mark())
ok(c.cuLibraryUnload(library))
say(name, ms, int(c.cuFuncLoad(kernel)[0]))
"""
    )
    assert said == ["spin_ns", pytest.approx(7, abs=0.001), 400]


def busy_ms(lab: SimLab, pid: int) -> float:
    processes = lab.status()["cards"][0]["processes"]
    return sum(p["busy_ns"] for p in processes if p["pid"] == pid) / 1e6


def test_work_goes_on_while_its_submitter_is_stopped(lab: SimLab) -> None:
    with lab.start(KERNEL + "for _ in range(50): launch(1)\nsay(1)\nsys.stdin.read()") as process:
        assert process.read() == 1
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(100):
            if busy_ms(lab, process.pid) == 50:
                break
            time.sleep(0.05)
        assert busy_ms(lab, process.pid) == 50
        samples = lab.python(
            """
import time, pynvml as n
n.nvmlInit()
time.sleep(0.2)
samples = n.nvmlDeviceGetProcessUtilization(n.nvmlDeviceGetHandleByIndex(0), 0)
print(sum(s.smUtil for s in samples) / 600 * 1000)
"""
        )
        assert float(samples) == pytest.approx(50, abs=4)  # whole percents of at most three samples


def test_what_a_killed_process_had_queued_is_not_worked_off(lab: SimLab) -> None:
    queue_much = KERNEL + "for _ in range(1000): launch(50)\nsay(1)\nsys.stdin.read()"
    with lab.start(queue_much) as hog:
        assert hog.read() == 1
        hog.kill()
    said = lab.cuda(KERNEL + "launch(1)\nok(c.cuCtxSynchronize())\nsay('done')")
    assert said == "done"
    assert lab.status()["cards"][0]["busy_ns"] < 10e9


def test_closed_contexts_keep_their_share_of_the_books(lab: SimLab) -> None:
    said = lab.cuda(
        TWO
        + """
def books():
    status = json.loads(subprocess.check_output([os.environ["MGPU_SIM"], "status", "--json"]))
    return [p["busy_ns"] for p in status["cards"][0]["processes"]]
answers = []
for context in other, ok(c.cuCtxCreate(None, 0, device)):
    use(context)
    launch(3)
    ok(c.cuCtxSynchronize())
    ok(c.cuCtxDestroy(context))
    answers.append(books())
say(answers)
"""
    )
    assert said == [[3_000_000], [6_000_000]]


# Launches and waits without end, in two threads.
BUSY = (
    KERNEL
    + """
import threading
def work():
    ok(c.cuCtxSetCurrent(primary))
    while True:
        launch(0)
        c.cuStreamSynchronize(0)
for _ in "ab":
    threading.Thread(target=work, daemon=True).start()
say("busy")
sys.stdin.read()
"""
)


def test_stopped_processes_hold_nobody_up(lab: SimLab) -> None:
    """Wherever they are stopped, another's work is launched and done as if they were not there."""
    once = KERNEL + "for line in sys.stdin:\n launch(1)\n ok(c.cuCtxSynchronize())\n say('done')\n"
    with lab.start("say(1)\n" + once) as client, lab.start(BUSY) as one, lab.start(BUSY) as two:
        assert [p.read() for p in (client, one, two)] == [1, "busy", "busy"]
        for _ in range(60):
            for process in (one, two):
                os.kill(process.pid, signal.SIGSTOP)
            assert client.ask("go") == "done"
            for process in (one, two):
                os.kill(process.pid, signal.SIGCONT)
