"""Tracker `cuda` and the enforcers, over the simulated libcuda and this machine's kernel."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from tests.exact import run as exact
from tests.lab import BIN, CLIENT, CONTEXT_MIB, MIB, SIM, Tenant, v2_mount, wait_for

pytestmark = pytest.mark.skipif(
    not (SIM / "libcuda.so.1").exists(), reason="the simulated libcuda is not built (make sim)"
)
KILLED = 128 + signal.SIGKILL


@pytest.fixture
def node(module_node):
    if module_node.agent is None or module_node.agent.poll() is not None:
        module_node.start_agent()
    yield module_node
    assert wait_for(lambda: not module_node.containers()), "a container was left bound"


@pytest.fixture
def cgroup(node):
    """A bound container: 4096 MiB on card 0."""
    path = v2_mount() / node.folder.name
    path.mkdir()
    node.cli("bind", f"/{path.name}", "--device", "0", "--core", "20", "--memory", "4096")
    yield path
    for pid in (path / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert wait_for(lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()


class Client:
    """tests/client.py in a cgroup, or outside any."""

    def __init__(self, node, cgroup=None, prefix="", environment=None):
        script = f'{prefix} exec {BIN}/python "$0"'
        if cgroup is not None:
            script = f"echo $$ > {cgroup}/cgroup.procs; " + script
        self.process = subprocess.Popen(
            ["sh", "-c", script, str(CLIENT)],
            env={**node.environment, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        self.pid = self.process.pid
        self.init = json.loads(self.process.stdout.readline() or '{"init": -1}')["init"]

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line)["result"] if line else "killed"

    def end(self):
        self.process.stdin.close()
        return self.process.wait(timeout=10)


def info(node):
    (row,) = node.containers()
    return row["vmem_info"]


def used_mib(node):
    return info(node)["used_bytes"] / MIB


def pids(node):
    return [pid["pid"] for pid in info(node)["pids"]]


def test_what_a_process_allocates_is_counted_and_leaves_with_it(node, cgroup):
    client = Client(node, cgroup)
    assert client.ask("alloc", 100) == 0
    assert used_mib(node) == CONTEXT_MIB + 100
    assert pids(node) == [client.pid]
    assert client.ask("free") == 0
    assert used_mib(node) == CONTEXT_MIB
    assert client.end() == 0
    assert wait_for(lambda: used_mib(node) == 0)
    assert pids(node) == []


def test_a_killed_process_leaves_nothing_counted(node, cgroup):
    client = Client(node, cgroup)
    assert client.ask("alloc", 1000) == 0
    client.process.kill()
    client.process.wait()
    assert wait_for(lambda: used_mib(node) == 0)


def test_a_zombie_has_given_its_memory_back(node, cgroup):
    client = Client(node, cgroup)
    assert client.ask("alloc", 1000) == 0
    client.process.kill()  # and not waited for
    assert wait_for(lambda: used_mib(node) == 0)
    client.process.wait()


def test_over_the_limit_is_killed_and_its_neighbour_goes_on(node, cgroup):
    first, second = Client(node, cgroup), Client(node, cgroup)
    assert first.ask("alloc", 3000) == 0
    assert second.ask("alloc", 1000) == "killed"  # 2 contexts and 3000 leave 584 MiB
    assert first.ask("alloc", 500) == 0
    (row,) = node.containers()
    assert (row["denials"], row["kills"]) == (1, 1)
    assert wait_for(lambda: f"pid={second.pid}" in node.log())
    line = [x for x in node.log().splitlines() if "process-killed" in x][-1]
    assert f"asked_bytes={1000 * MIB}" in line
    assert f"held_bytes={CONTEXT_MIB * MIB}" in line
    assert node.metric("mgpu_container_kills_total", device_id=0) == 1
    assert first.end() == 0
    second.process.wait()


def test_observe_counts_and_lets_go(node, cgroup):
    container = node.containers()[0]["id"]
    node.cli("set", container, "--enforcer", "observe")
    client = Client(node, cgroup)
    assert client.ask("alloc", 5000) == 0
    (row,) = node.containers()
    assert (row["denials"], row["kills"]) == (1, 0)
    assert row["vmem_info"]["used_bytes"] == (5000 + CONTEXT_MIB) * MIB
    assert row["vmem_info"]["free_bytes"] == 0
    assert client.end() == 0


def test_a_limit_below_what_is_used_needs_force_and_then_nothing_new_fits(node, cgroup):
    container = node.containers()[0]["id"]
    client = Client(node, cgroup)
    assert client.ask("alloc", 2000) == 0
    assert node.cli("set", container, "--memory", "1024", check=False).returncode == 5
    assert info(node)["limit_bytes"] == 4096 * MIB
    node.cli("set", container, "--memory", "1024", "--force")
    assert info(node)["free_bytes"] == 0
    assert client.ask("free") == 0
    assert client.ask("alloc", 500) == 0
    assert client.ask("alloc", 2000) == "killed"
    client.process.wait()


def test_a_process_that_joins_the_cgroup_later_is_counted(node, cgroup):
    client = Client(node)
    assert client.ask("alloc", 100) == 0
    (cgroup / "cgroup.procs").write_text(str(client.pid))
    assert client.ask("alloc", 50) == 0
    assert wait_for(lambda: used_mib(node) == CONTEXT_MIB + 150), "NVML's figure is charged"
    assert client.end() == 0


def test_a_child_in_a_nested_cgroup_is_its_containers(node, cgroup):
    nested = cgroup / "nested"
    nested.mkdir()
    client = Client(node, nested)
    assert client.ask("alloc", 64) == 0
    assert used_mib(node) == CONTEXT_MIB + 64
    assert client.end() == 0
    assert wait_for(lambda: not (nested / "cgroup.procs").read_text())
    nested.rmdir()


def test_a_container_of_cgroup_v1_alone_is_counted_and_limited(node, devices_v1):
    path = devices_v1.devices.mount / node.folder.name
    path.mkdir()
    node.cli("bind", f"/{path.name}", "--device", "0", "--core", "20", "--memory", "4096")
    client, other = Client(node, path), Client(node)
    assert client.ask("alloc", 1000) == 0
    assert used_mib(node) == CONTEXT_MIB + 1000
    assert other.ask("alloc", 200) == 0
    (path / "cgroup.procs").write_text(str(other.pid))
    assert wait_for(lambda: used_mib(node) == 2 * CONTEXT_MIB + 1200), "NVML's figure is charged"
    assert other.ask("alloc", 3000) == "killed"
    other.process.wait()
    assert client.end() == 0
    assert wait_for(lambda: used_mib(node) == 0)
    path.rmdir()


def test_a_copy_of_libcuda_in_another_mount_namespace_is_found(node, cgroup, tmp_path):
    shutil.copy(SIM / "libcuda.so.1", tmp_path / "libcuda.so.1")
    script = f"mount --bind {tmp_path}/libcuda.so.1 {SIM}/libcuda.so.1 &&"
    client = Client(
        node, cgroup, prefix=f"exec unshare -m sh -c '{script} exec {BIN}/python {CLIENT}' ;"
    )
    assert client.init == 0
    assert wait_for(lambda: node.log().count("library-probed") >= 2)
    assert client.ask("alloc", 128) == 0
    assert used_mib(node) == CONTEXT_MIB + 128
    assert client.end() == 0


def test_exec_starts_from_nothing(node, cgroup):
    code = (
        "import os,sys;from cuda.bindings import driver as c;c.cuInit(0);"
        "e,x=c.cuDevicePrimaryCtxRetain(0);c.cuCtxSetCurrent(x);c.cuMemAlloc(100<<20);"
        "print('held',flush=True);sys.stdin.readline();"
        "os.execv('/bin/sh',['sh','-c','echo gone;read line'])"
    )
    script = f'echo $$ > {cgroup}/cgroup.procs; exec {BIN}/python -c "{code}"'
    process = subprocess.Popen(
        ["sh", "-c", script],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert process.stdout.readline() == "held\n"
    assert used_mib(node) == CONTEXT_MIB + 100
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "gone\n"
    assert wait_for(lambda: used_mib(node) == 0)
    process.stdin.close()
    process.wait()


def test_the_limit_holds_and_counting_goes_on_while_no_agent_runs(node, cgroup):
    client, other = Client(node, cgroup), Client(node, cgroup)
    assert client.ask("alloc", 1000) == 0
    node.stop_agent(signal.SIGKILL)
    assert client.ask("alloc", 1000) == 0
    assert other.ask("alloc", 2000) == "killed"
    other.process.wait()
    late = Client(node, cgroup)
    assert late.ask("alloc", 100) == 0
    node.start_agent()
    assert used_mib(node) == 2 * CONTEXT_MIB + 2100
    assert "compiled=False" in node.log().split("programs-ready")[-1].splitlines()[0]
    assert client.end() == 0
    assert late.end() == 0


def test_a_process_that_dies_while_no_agent_runs_is_not_counted(node, cgroup):
    client, other = Client(node, cgroup), Client(node, cgroup)
    assert client.ask("alloc", 3000) == 0
    node.stop_agent(signal.SIGKILL)
    assert client.end() == 0
    time.sleep(0.1)  # the task is freed by RCU
    assert other.ask("alloc", 3500) == 0
    node.start_agent()
    assert used_mib(node) == CONTEXT_MIB + 3500
    assert other.end() == 0


def probed(node):
    """The inodes of the libraries that are probed."""
    names = [link.name for link in (node.bpf_root / "links").iterdir()]
    return {tuple(name.split("-")[2:4]) for name in names if name.split("-")[1] == "u"}


def test_probes_go_with_the_last_process_that_needs_them(node, cgroup, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(SIM / "libcuda.so.1", folder)
    shutil.copy(SIM / "libnvidia-ml.so.1", folder)
    assert wait_for(lambda: len(probed(node)) == 1, seconds=30), "the host's own is"
    logged = node.log().count("library-probed")
    client = Client(node, cgroup, environment={"LD_LIBRARY_PATH": str(folder)})
    assert client.init == 0
    assert wait_for(lambda: node.log().count("library-probed") > logged, seconds=30)
    assert client.end() == 0
    again = Client(node, cgroup, environment={"LD_LIBRARY_PATH": str(folder)})
    assert again.ask("alloc", 10) == 0
    assert used_mib(node) == CONTEXT_MIB + 10, "the probes have stayed for the next one"
    assert again.end() == 0
    assert wait_for(lambda: len(probed(node)) == 1, seconds=30)


def test_two_cards_each_count_their_own(node):
    for device in "01":
        node.cli("policy", device, "native-burst-share")
    tenant = Tenant(node, "two", "--cards", "2", "--core", "10", "--memory", "4096")
    assert tenant.ask("count")["count"] == 2
    assert tenant.ask("alloc", 100, 0)["result"] == 0
    assert tenant.ask("alloc", 300, 1)["result"] == 0
    expected = {0: (CONTEXT_MIB + 100) * MIB, 1: (CONTEXT_MIB + 300) * MIB}
    assert node.used("two") == expected
    assert tenant.ask("alloc", 2000, 1)["result"] == "killed"
    assert tenant.end() == KILLED


def test_counters_are_exact_under_load(node):
    outcome = exact.run(node, processes=4, threads=4, operations=16000, phases=4, limit_mib=8192)
    assert outcome.worst_bytes == 0
    assert outcome.most_used_bytes > 0
