"""Measures what the agent costs and how exact it is: `sudo make bench`.

Writes build/bench.json and the table in docs/benchmarks.md. Ratios compare what was measured side
by side in one run. Everything but the cards is real; the cards are simulated.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import psutil

from tests.bench import report
from tests.exact import run as exact
from tests.lab import SIM, Node, v2_mount, wait_for

CARDS = 8
INSTANCES = 128
PIDS_EACH = 8
PAIRS = 20000
OPENS = 20000
IDLE_S = 60
COLD_STARTS = 3
# So long the kernel is busy with the probes of an agent that was torn down (0.2 s each on 6.18).
SETTLE_S = 30
VANISHING = 10000
OPERATIONS = 1_000_000
CONF = "[sim]\n" + "".join(
    f"[card{i}]\nname = NVIDIA A10 {i} (simulated)\nmemory_mib = 131072\n" for i in range(CARDS)
)

Figures = Dict[str, float]


def compiled(node: Node, name: str) -> Path:
    target = node.folder / name
    command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Werror", f"-I{SIM}/include/cuda"]
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([*command, "-o", target, source, str(SIM / "libcuda.so.1")], check=True)
    return target


@contextmanager
def bound(node: Node, name: str, *options: str) -> Iterator[Path]:
    """A cgroup with an instance, for as long as the block runs."""
    path = v2_mount() / f"{node.folder.name}-{name}"
    path.mkdir()
    try:
        node.cli("bind", f"/{path.name}", *options)
        yield path
    finally:
        path.rmdir()


def inside(node: Node, cgroup: Path, command: List[str], **variables: str) -> str:
    """Output of a command in a cgroup; the tree's root is no container's."""
    script = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
    return subprocess.run(
        ["sh", "-c", script, "inside", *command],
        env={**node.environment, **variables},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout


def alternating(works: Dict[str, Callable[[], float]], rounds: int = 5) -> Figures:
    """Median of each, measured in turns so that a slow moment of the machine meets all."""
    found: Dict[str, List[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return {name: statistics.median(values) for name, values in found.items()}


def pair_cost(node: Node) -> Figures:
    """cuMemAlloc and cuMemFree: without any probe, probed but of no container, in a container."""
    program = compiled(node, "pair")
    plain = node.folder / "plain"
    plain.mkdir()
    shutil.copy(SIM / "libcuda.so.1", plain)
    with bound(node, "pair", "--core", "10", "--memory", "4096") as cgroup:
        command = [str(program), str(PAIRS // 20)]
        root = v2_mount()
        works = {
            "pair_without_probes_ns": lambda: float(
                inside(node, root, command, LD_LIBRARY_PATH=str(plain))
            ),
            "pair_probed_unbound_ns": lambda: float(inside(node, root, command)),
            "pair_bound_ns": lambda: float(inside(node, cgroup, command)),
        }
        inside(node, cgroup, command)  # the library is probed from here on
        return alternating(works)


def open_cost(node: Node) -> Figures:
    """open() of a card's node and of /dev/null, without and with the gate."""
    program = compiled(node, "open")
    with bound(node, "open", "--device", "0", "--core", "10", "--memory", "4096") as cgroup:

        def measure(where: Path, path: str) -> Callable[[], float]:
            return lambda: float(inside(node, where, [str(program), path, str(OPENS)]))

        return alternating(
            {
                "open_card_without_gate_ns": measure(v2_mount(), "/dev/mgpu0"),
                "open_card_with_gate_ns": measure(cgroup, "/dev/mgpu0"),
                "open_null_without_gate_ns": measure(v2_mount(), "/dev/null"),
                "open_null_with_gate_ns": measure(cgroup, "/dev/null"),
            }
        )


def exactness(node: Node) -> Figures:
    begun = time.monotonic()
    found = exact.run(node, 8, 4, OPERATIONS, 25, 16384)
    return {
        "exact_operations": found.operations,
        "exact_quiet_points": found.quiet_points,
        "exact_worst_difference_bytes": found.worst_bytes,
        "exact_seconds": round(time.monotonic() - begun, 1),
    }


def times_ms(count: int, work: Callable[[], object]) -> Tuple[float, float]:
    """Median and worst."""
    work()
    found = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - begun))
    return statistics.median(found), max(found)


def crowd(node: Node) -> Figures:
    """128 instances with 8 processes each: scrape, listing, and what the agent itself takes."""
    program = compiled(node, "holder")
    cgroups, holders = [], []
    try:
        for i in range(INSTANCES):
            path = v2_mount() / f"{node.folder.name}-crowd-{i}"
            path.mkdir()
            cgroups.append(path)
            card = str(i % CARDS)
            node.cli("bind", f"/{path.name}", "--device", card, "--core", "5", "--memory", "4096")
        idle = idle_cost(node)
        for path in cgroups:
            script = f'echo $$ > {path}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", script, "holder", str(program), str(PIDS_EACH), "10"]
            holders.append(node.start(command))
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
        return {**idle, **crowd_figures(node)}
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
        for path in cgroups:
            wait_for(lambda path=path: not (path / "cgroup.procs").read_text())
            path.rmdir()


def crowd_figures(node: Node) -> Figures:
    url = f"http://127.0.0.1:{node.port}/metrics"

    def scrape() -> None:
        with urllib.request.urlopen(url) as page:
            text = page.read()
        assert text.count(b"mgpu_process_vmem_used_bytes{") == INSTANCES * PIDS_EACH

    scrape_ms, scrape_worst_ms = times_ms(30, scrape)
    listing_ms, listing_worst_ms = times_ms(15, lambda: node.cli("container", "info"))
    return {
        "scrape_ms": scrape_ms,
        "scrape_worst_ms": scrape_worst_ms,
        "container_info_ms": listing_ms,
        "container_info_worst_ms": listing_worst_ms,
        "rss_crowd_mb": rss_mb(node),
    }


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rss_mb(node: Node) -> float:
    """Resident memory of the agent, less the state of all cards that the simulated NVML maps."""
    maps = psutil.Process(agent_pid(node)).memory_maps()
    simulated = str(node.sim_dir)
    return sum(each.rss for each in maps if not each.path.startswith(simulated)) / 1e6


def agent_pid(node: Node) -> int:
    assert node.agent is not None
    return node.agent.pid


def idle_cost(node: Node) -> Figures:
    time.sleep(2)
    pid = agent_pid(node)
    before, begun = cpu_s(pid), time.monotonic()
    time.sleep(IDLE_S)
    share = (cpu_s(pid) - before) / (time.monotonic() - begun)
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {
        "idle_core_percent": 100 * share,
        "idle_rss_mb": rss_mb(node),
        "llvm_mapped": float("LLVM" in maps or "libbcc" in maps),
    }


def starts(node: Node) -> Figures:
    """Cold: nothing compiled, nothing of an earlier agent in the kernel; restarts after SIGKILL."""
    colds = []
    for turn in range(COLD_STARTS):
        if turn:
            node.teardown()
            time.sleep(SETTLE_S)
        colds.append(node.start_agent())
        node.stop_agent()
    restarts = []
    for _ in range(5):
        restarts.append(node.start_agent())
        node.stop_agent(9)
    node.start_agent()
    return {
        "cold_start_s": statistics.median(colds),
        "cold_start_worst_s": max(colds),
        "restart_s": statistics.median(restarts),
    }


def vanishing(node: Node) -> Figures:
    """Containers that are bound and vanish, one after the other: does anything stay behind?"""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agent"))
    from mgpu.client import Client

    client = Client(node.environment["MGPU_SOCKET"])
    before: Dict[str, float] = {}
    begun = time.monotonic()
    for i in range(VANISHING):
        if i == 100:
            before = footprint(node)
        path = v2_mount() / f"{node.folder.name}-v{i}"
        path.mkdir()
        values = {"target": f"/{path.name}", "core": 1, "memory_mib": 256}
        client.bind(values)
        path.rmdir()
    assert wait_for(lambda: not node.containers(), 60)
    after = footprint(node)
    return {
        "vanishing_containers": VANISHING,
        "vanishing_seconds": round(time.monotonic() - begun, 1),
        **{f"leaked_{name}": after[name] - before[name] for name in after},
    }


def footprint(node: Node) -> Figures:
    """What the agent holds with nothing bound, once it has swept up what dead processes left."""
    wait_for(lambda: not node.containers() and not map_entries(node), 120)
    pid = agent_pid(node)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "map_entries": map_entries(node),
        "nodes": len([x for x in os.listdir("/dev") if x.startswith("mgpu")]),
        "rss_mb": rss_mb(node),
    }


def map_entries(node: Node) -> int:
    from mgpu.bpf import Map

    entries = 0
    for name in ("bound", "limits", "counts", "held", "processes", "objects"):
        (path,) = node.bpf_root.glob(f"*/maps/{name}")
        opened = Map.pinned(path)
        entries += len(opened.key_list())
        opened.close()
    return entries


def machine() -> Dict[str, Any]:
    model = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "processor": model[0].partition(": ")[2] if model else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    node = Node(sim_conf=CONF)
    figures: Figures = {}
    try:
        for part in (starts, pair_cost, open_cost, exactness, crowd, vanishing):
            print(f"measuring: {part.__name__} ...", flush=True)
            found = part(node)
            figures.update(found)
            print("   " + ", ".join(f"{k} {v:g}" for k, v in found.items()), flush=True)
    finally:
        node.close()
    where = machine()
    Path("build/bench.json").write_text(json.dumps({"machine": where, **figures}, indent=2))
    report.write(Path("docs/benchmarks.md"), where, figures)
    print("wrote build/bench.json and docs/benchmarks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
