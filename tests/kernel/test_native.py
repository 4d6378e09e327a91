"""Enforcer `native`: the (simulated) driver refuses by itself, with CUDA's out of memory."""

import json
import signal

import pytest
from tests.kernel.conftest import a_node
from tests.kernel.test_faults_node import check
from tests.lab import BIN, CONTEXT_MIB, MIB, Tenant, v2_mount, wait_for

NEW = "[sim]\ndriver_version = 615.10.01\n"
SHARE = ("--device", "0", "--core", "20", "--memory", "2048")
OUT_OF_MEMORY = {"result": 2}
LIMIT = """
import sys
import pynvml as n
n.nvmlInit()
limits = n.c_nvmlGetMemoryLimits_v1_t(sys.argv[1].encode())
try:
    n.nvmlDeviceGetMemoryLimits_v1(n.nvmlDeviceGetHandleByIndex(0), limits)
    print(limits.hardLimit >> 20)
except n.NVMLError_NotFound:
    print("none")
"""


@pytest.fixture(scope="module")
def agent():
    with a_node(sim_conf=NEW) as node:
        node.start_agent()
        yield node


@pytest.fixture
def cgroup(agent):
    path = v2_mount() / f"{agent.folder.name}-native"
    path.mkdir()
    yield path
    path.rmdir()


def limit_mib(node, folder):
    return node.start([str(BIN / "python"), "-c", LIMIT, str(folder)]).communicate()[0].strip()


def reload(node, **keys):
    """Another agent.conf, and it is in force."""
    before = node.log().count(" reloaded")
    node.configure(reconcile_interval_s=0.3, **keys)
    node.agent.send_signal(signal.SIGHUP)
    assert wait_for(lambda: node.log().count(" reloaded") > before)


def test_over_the_limit_is_out_of_memory_and_the_program_goes_on(agent):
    tenant = Tenant(agent, "a", *SHARE)
    assert agent.containers()[0]["enforcer"] == "native"
    assert tenant.ask("alloc", 1000) == {"result": 0}
    assert tenant.ask("alloc", 1000) == OUT_OF_MEMORY
    free = (2048 - CONTEXT_MIB - 1000) * MIB
    assert tenant.ask("info") == {"result": 0, "total_bytes": 2048 * MIB, "free_bytes": free}
    assert tenant.ask("alloc", 2048 - CONTEXT_MIB - 1000) == {"result": 0}
    assert agent.used("a") == {0: 2048 * MIB}
    assert agent.metric("mgpu_container_vmem_denials_total") == 1
    assert agent.metric("mgpu_container_kills_total") == 0
    assert tenant.end() == 0


def test_a_limit_follows_the_instance(agent, cgroup):
    bound = json.loads(agent.cli("bind", f"/{cgroup.name}", *SHARE, "-o", "json").stdout)
    assert limit_mib(agent, cgroup) == "2048"
    name = bound["id"]
    agent.cli("set", name, "--memory", "3000")
    assert limit_mib(agent, cgroup) == "3000"
    agent.cli("set", name, "--enforcer", "kill")
    assert limit_mib(agent, cgroup) == "none"
    agent.cli("set", name, "--enforcer", "default")
    assert limit_mib(agent, cgroup) == "3000"
    agent.cli("release", name)
    assert limit_mib(agent, cgroup) == "none"


def test_check_and_metrics_name_it(agent):
    assert check(agent, "enforcer", "native")["in_use"]
    assert check(agent, "enforcer", "kill")["available"]
    assert not check(agent, "enforcer", "kill")["in_use"]
    assert agent.metric("mgpu_agent_info", enforcer="native", tracker="cuda") == 1


def test_another_enforcer_takes_the_limit_away_and_back_again(agent):
    tenant = Tenant(agent, "a", *SHARE)
    reload(agent, enforce="kill")
    assert agent.metric("mgpu_agent_info", enforcer="kill") == 1
    assert tenant.ask("alloc", 4000) == {"result": "killed"}
    reload(agent)
    assert agent.metric("mgpu_agent_info", enforcer="native") == 1


def test_it_holds_while_the_agent_is_dead_and_is_taken_over(agent):
    tenant = Tenant(agent, "a", *SHARE)
    agent.stop_agent(signal.SIGKILL)
    assert tenant.ask("alloc", 4000) == OUT_OF_MEMORY
    agent.start_agent()
    assert tenant.ask("alloc", 4000) == OUT_OF_MEMORY
    assert tenant.ask("alloc", 1000) == {"result": 0}
    assert agent.used("a") == {0: (CONTEXT_MIB + 1000) * MIB}
    assert tenant.end() == 0
