"""Counting held against the simulation's own books, to the byte, while many processes allocate.

Used by a test (few operations) and by the benchmark (10^6).
"""

import json
import subprocess
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from tests.lab import SIM, Node, v2_mount, wait_for

SOURCE = Path(__file__).with_name("operations.c")


class Outcome(NamedTuple):
    """``worst_bytes``: the largest difference of any process at any quiet point."""

    operations: int
    quiet_points: int
    worst_bytes: int
    most_used_bytes: int


def build(folder: Path, source: Path = SOURCE) -> Path:
    """A client, compiled against NVIDIA's header and linked with the simulated libcuda."""
    program = folder / source.stem
    include = SIM / "include/cuda"
    command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Werror", "-pthread", f"-I{include}"]
    subprocess.run(
        [*command, "-o", str(program), str(source), str(SIM / "libcuda.so.1")], check=True
    )
    return program


def start(node: Node, program: Path, cgroup: Path, *words: object) -> "subprocess.Popen[str]":
    """The client as a process of ``cgroup``."""
    script = f'echo $$ > {cgroup}/cgroup.procs; exec {program} "$@"'
    return subprocess.Popen(
        ["sh", "-c", script, "client", *map(str, words)],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )


def books(node: Node) -> Dict[int, int]:
    """The simulation's own: bytes by PID."""
    found: Dict[int, int] = {}
    for card in json.loads(node.sim("status", "--json"))["cards"]:
        for process in card["processes"]:
            found[process["pid"]] = found.get(process["pid"], 0) + process["bytes"]
    return found


def counted(node: Node) -> Dict[int, int]:
    """The tracker's: bytes by PID."""
    return {
        pid["pid"]: pid["tracked_bytes"]
        for row in node.containers()
        for pid in row["vmem_info"]["pids"]
    }


def difference(node: Node) -> int:
    truth, count = books(node), counted(node)
    return max((abs(truth.get(p, 0) - count.get(p, 0)) for p in set(truth) | set(count)), default=0)


def run(
    node: Node, processes: int, threads: int, operations: int, phases: int, limit_mib: int
) -> Outcome:
    """``operations`` in all, over two containers of half of the processes each."""
    program = build(node.folder)
    cgroups = [v2_mount() / f"{node.folder.name}-{i}" for i in range(2)]
    for cgroup in cgroups:
        cgroup.mkdir()
        node.cli("bind", f"/{cgroup.name}", "--core", "40", "--memory", str(limit_mib))
    each = operations // (processes * threads)
    room_mib = limit_mib // processes
    clients = [
        start(node, program, cgroups[i % 2], i, threads, each, phases, room_mib)
        for i in range(processes)
    ]
    try:
        return _watch(node, clients, phases, operations)
    finally:
        for client in clients:
            client.kill()
            client.wait()
        for cgroup in cgroups:
            wait_for(lambda cgroup=cgroup: not (cgroup / "cgroup.procs").read_text())
            cgroup.rmdir()


def _watch(node: Node, clients: List[Any], phases: int, operations: int) -> Outcome:
    worst = most = 0
    for _ in range(phases):
        for client in clients:
            line = client.stdout.readline()
            if line != "quiet\n":
                raise AssertionError(f"a client ended: {client.wait()}")
        worst = max(worst, difference(node))
        for row in node.containers():
            info = row["vmem_info"]
            most = max(most, info["used_bytes"])
            assert info["used_bytes"] <= info["limit_bytes"]
        for client in clients:
            client.stdin.write("\n")
            client.stdin.flush()
    for client in clients:
        assert client.wait(timeout=60) == 0
    assert wait_for(lambda: difference(node) == 0), "what ended processes held is still counted"
    return Outcome(operations, phases, worst, most)
