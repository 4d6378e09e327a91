"""The main job, seen from outside: `sudo make demo`. Exit 0 only if all of it was seen.

The cards are simulated (build/sim); device nodes, cgroups, eBPF, processes and metrics are real.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.lab import BIN, CLIENT, CONTEXT_MIB, MIB, Node, Tenant, leftovers, v2_mount, wait_for

GUARDED = "mgpu-demo"
CUDA_NO_DEVICE = 100


def say(text: str) -> None:
    print(text, flush=True)


def must(truth: bool, what: str) -> None:
    """One thing that has to be seen."""
    if not truth:
        raise SystemExit(f"FAILED  {what}")
    say(f"  ok    {what}")


def until(truth: Any, what: str) -> None:
    must(wait_for(truth), what)


def tenant(node: Node, name: str, *options: str) -> Tenant:
    started = Tenant(node, name, *options)
    must(started.init == 0, f"{name}: mgpu-cli run {' '.join(options)}")
    return started


def agree(node: Node, what: str) -> None:
    """mgpu-cli, /metrics and NVML say the same of every card and container."""

    def same() -> bool:
        rows = node.containers()
        by_card: Dict[int, int] = {}
        for row in rows:
            used = row["vmem_info"]["used_bytes"]
            by_card[row["device_id"]] = by_card.get(row["device_id"], 0) + used
            labels = {"device_id": row["device_id"], "instance_id": row["instance_id"]}
            if node.metric("mgpu_container_vmem_used_bytes", **labels) != used:
                return False
        driver = node.driver_used()
        return all(driver[card] == used for card, used in by_card.items())

    until(same, what)


def stranger(node: Node, cgroup: Path) -> int:
    """cuInit of a client in a guarded cgroup that holds nothing."""
    script = f"echo $$ > {cgroup}/cgroup.procs; exec {BIN}/python {CLIENT}"
    done = subprocess.run(
        ["sh", "-c", script],
        env=node.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    answer: int = json.loads(done.stdout)["init"]
    return answer


def share(node: Node) -> None:
    say("Two simulated cards, three containers")
    a = tenant(node, "a", "--device", "1", "--core", "30", "--memory", "4096")
    b = tenant(node, "b", "--device", "1", "--core", "60", "--memory", "8192")
    c = tenant(node, "c", "--cards", "2", "--core", "10", "--memory", "4096")
    must(a.ask("alloc", 1024)["result"] == 0, "a allocates 1024 MiB of its 4096")
    must(b.ask("alloc", 6000)["result"] == 0, "b allocates 6000 MiB of its 8192")
    must(c.ask("alloc", 512, 0)["result"] == 0, "c allocates 512 MiB on its first card")
    must(c.ask("alloc", 700, 1)["result"] == 0, "c allocates 700 MiB on its second card")
    must(a.ask("count")["count"] == 1, "a sees one card")
    must(c.ask("count")["count"] == 2, "c sees two cards")
    must(node.used("a") == {1: (1024 + CONTEXT_MIB) * MIB}, "a is charged 1024 MiB and its context")
    agree(node, "container info, /metrics and NVML agree")
    say(node.cli("device", "info", "-a").stdout)
    say(node.cli("container", "info").stdout)
    limits(node, a, b, c)


def limits(node: Node, a: Tenant, b: Tenant, c: Tenant) -> None:
    say("Limits")
    must(a.ask("alloc", 4096)["result"] == "killed", "a asks for too much and is stopped")
    must(a.end() == 128 + signal.SIGKILL, "its exit status is that of SIGKILL")
    until(lambda: not node.used("a"), "a's instance is released")
    until(lambda: "process-killed" in node.log(), "the journal names it")
    say("        " + [x for x in node.log().splitlines() if "process-killed" in x][0])
    must(b.ask("alloc", 100)["result"] == 0, "its neighbour b goes on")
    survive(node, b, c)


def survive(node: Node, b: Tenant, c: Tenant) -> None:
    say("The agent is killed")
    before = {name: node.used(name) for name in "bc"}
    node.stop_agent(signal.SIGKILL)
    must(b.ask("alloc", 1000)["result"] == 0, "b allocates while no agent runs")
    must(c.ask("alloc", 4096, 0)["result"] == "killed", "c still cannot go over its limit")
    c.end()
    seconds = node.start_agent()
    say(f"        the agent is back after {seconds:.2f} s")
    expected = {card: used + 1000 * MIB for card, used in before["b"].items()}
    must(node.used("b") == expected, "it shows what b had and what b got meanwhile")
    until(lambda: not node.used("c"), "c, which died meanwhile, is released")
    ready = [line for line in node.log().splitlines() if "programs-ready" in line]
    must("compiled=False" in ready[-1], "nothing was compiled again")
    agree(node, "container info, /metrics and NVML agree again")
    must(b.end() == 0, "b ends")
    until(lambda: not node.containers(), "nothing is given out any more")


@contextmanager
def guarded_cgroup() -> Iterator[Path]:
    outer = v2_mount() / GUARDED
    inner = outer / "nothing"
    inner.mkdir(parents=True)
    try:
        yield inner
    finally:
        inner.rmdir()
        outer.rmdir()


def run(node: Node) -> None:
    with guarded_cgroup() as cgroup:
        say(f"  ok    agent ready after {node.start_agent():.2f} s, programs compiled")
        for device in ("0", "1"):
            node.cli("policy", device, "native-burst-share")
        until(lambda: stranger(node, cgroup) == CUDA_NO_DEVICE, "without an instance: no card")
        share(node)
    say("Teardown")
    must(node.stop_agent() == 0, "the agent stops")
    must(node.teardown().returncode == 0, "mgpu-agent teardown")
    must(not leftovers(node.bpf_root), "nothing left in /dev, /sys/fs/bpf, /sys/fs/cgroup")
    must("traceback=" not in node.log(), "no traceback in the agent's log")


def main() -> int:
    if os.geteuid() != 0:
        raise SystemExit("demo: needs root (BPF, device nodes, cgroups); use sudo make demo")
    begun = time.monotonic()
    node = Node(guard=f"/{GUARDED}", reconcile_interval_s=0.5)
    there = leftovers(node.bpf_root)
    try:
        if there:
            raise SystemExit(f"demo: another agent's things are here: {', '.join(there)}")
        run(node)
    except SystemExit:
        say(node.log() if (node.folder / "agent.log").exists() else "")
        raise
    finally:
        if not there:
            node.close()
    say(f"All of it was seen, in {time.monotonic() - begun:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
