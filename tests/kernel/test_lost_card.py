"""A card that NVML loses under a running agent: its figures go, the rest goes on, it comes back."""

import json

import pytest
from tests.lab import MIB, Tenant, wait_for

REASONS = {
    "lost": "NVML says: GPU is lost",
    "unknown": "NVML says: Unknown Error",
    "timeout": "NVML says: Timeout",
    "hang": "NVML does not answer",
}
UUID_A10 = "GPU-51300000-0000-4000-8000-000000000001"


def devices(node):
    return json.loads(node.cli("device", "info", "-a", "-o", "json").stdout)["devices"]


def states(node):
    return [(device["device_state"], device["device_state_reason"]) for device in devices(node)]


@pytest.fixture
def agent(module_node):
    if module_node.agent is None:
        module_node.start_agent()
    yield module_node
    module_node.sim("reset")
    assert wait_for(lambda: states(module_node) == [("ok", None)] * 2, 30)
    assert wait_for(lambda: not module_node.containers())


@pytest.mark.parametrize("fault", REASONS)
def test_a_lost_card_is_marked_and_comes_back(agent, fault):
    tenant = Tenant(agent, "b", "--device", "1", "--core", "20", "--memory", "2048")
    assert tenant.ask("alloc", 100) == {"result": 0}
    before = agent.used("b")
    agent.sim("fault", "1", fault)
    assert wait_for(lambda: states(agent) == [("ok", None), ("lost", REASONS[fault])], 20)
    lost, well = devices(agent)[1], devices(agent)[0]
    assert lost["vmem_used_bytes"] is None
    assert lost["utilisation_ratio"] is None
    assert lost["device_uuid"] == UUID_A10
    assert well["vmem_used_bytes"] == 0
    assert agent.metric("mgpu_device_up", device_uuid=UUID_A10) == 0
    assert not any(
        "mgpu_device_vmem_used_bytes" in key and UUID_A10 in key for key in agent.metrics()
    )
    # What the container holds there is counted in the kernel: it does not need NVML.
    assert agent.used("b") == before
    assert tenant.ask("alloc", 100) == {"result": 0}
    assert agent.used("b") == {1: before[1] + 100 * MIB}
    # Nothing new is put on the lost card; the other one serves.
    refused = agent.cli(
        "run", "--device", "1", "--core", "5", "--memory", "1024", "--", "true", check=False
    )
    assert refused.returncode == 125
    agent.cli("run", "--device", "0", "--core", "5", "--memory", "1024", "--", "true")
    agent.sim("fault", "1", "none")
    assert wait_for(lambda: states(agent) == [("ok", None)] * 2, 30)
    assert agent.metric("mgpu_device_up", device_uuid=UUID_A10) == 1
    assert devices(agent)[1]["vmem_used_bytes"] == before[1] + 100 * MIB
    assert tenant.end() == 0


def test_the_log_names_the_loss_once(agent):
    begun = len(agent.log())
    agent.sim("fault", "0", "unknown")
    assert wait_for(lambda: states(agent)[0][0] == "lost", 20)
    for _ in range(5):
        agent.sim("status")
        states(agent)
    agent.sim("fault", "0", "none")
    assert wait_for(lambda: states(agent)[0][0] == "ok", 30)
    said = agent.log()[begun:]
    assert said.count("device-lost") == 1
    assert said.count("device-back") == 1
