"""/metrics: complete, correct by hand, never stuck, and readable by Prometheus's own tools."""

import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, Tuple

import pytest
from front_doubles import A10, H200, Node, fill
from prometheus_client.parser import text_string_to_metric_families

from mgpu.errors import ConfigInvalid
from mgpu.http_message import HttpRequest
from mgpu.httpd import HttpServer
from mgpu.listen import tcp_socket
from mgpu.metrics import METRICS, Metrics
from mgpu.model import MIB, PidUse

DOCS = Path(__file__).parents[2] / "docs"
Samples = Dict[Tuple[str, FrozenSet[Tuple[str, str]]], float]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def page(node: Node) -> str:
    metrics = Metrics(node.figures)
    answer = metrics.answer(HttpRequest("GET", "/metrics"))
    metrics.stop()
    assert answer.content_type.startswith("text/plain; version=0.0.4")
    return answer.body.decode()


def samples(node: Node) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page(node))
        for sample in family.samples
    }


def value(found: Samples, metric: str, /, **labels: str) -> float:
    """The one sample of ``metric`` that has these labels."""
    fits = [
        v for (n, have), v in found.items() if n == metric and labels.items() <= dict(have).items()
    ]
    assert len(fits) == 1, (metric, labels, fits)
    return fits[0]


def count(found: Samples, name: str) -> int:
    return sum(1 for n, _ in found if n == name)


def test_a_container_in_figures(node: Node) -> None:
    container_id = node.bind("aaaa", device=0, name='quo"te', pod_uid="pod-1")
    node.use("aaaa", PidUse(7, 512 * MIB, 256 * MIB), PidUse(8, 100), denials=3, kills=2)
    node.cards.processes = {H200.uuid: {7: 768 * MIB, 99: 5}}
    found = samples(node)
    where = {"container_id": container_id, "device_id": "0", "instance_id": "0"}
    where["simulated"] = "true"
    assert value(found, "mgpu_container_compute_weight", **where) == 30
    assert value(found, "mgpu_container_vmem_limit_bytes", **where) == 4096 * MIB
    assert value(found, "mgpu_container_vmem_used_bytes", **where) == 768 * MIB + 100
    assert value(found, "mgpu_container_vmem_free_bytes", **where) == 3328 * MIB - 100
    assert value(found, "mgpu_process_vmem_used_bytes", pid="7", **where) == 768 * MIB
    assert value(found, "mgpu_process_vmem_used_bytes", pid="8", **where) == 100
    assert value(found, "mgpu_container_vmem_denials_total", **where) == 3
    assert value(found, "mgpu_container_kills_total", **where) == 2
    # PID 7: 768 - 512 MiB. PID 8 is unknown to the driver, and 99 to the tracker.
    assert value(found, "mgpu_vmem_tracker_difference_bytes", **where) == 256 * MIB
    names = {"container_id": container_id, "pod_uid": "pod-1", "name": 'quo"te'}
    assert value(found, "mgpu_container_info", origin="bind", enforcer="kill", **names) == 1


def test_the_devices_in_figures(node: Node) -> None:
    node.bind("aaaa", device=1)
    node.bind("bbbb", device=1, core=5, memory_mib=1024, online=False)
    node.cards.processes = {A10.uuid: {7: 12345}}
    found = samples(node)
    card = {"device_id": "1", "device_uuid": A10.uuid, "simulated": "true"}
    assert value(found, "mgpu_device_info", name="NVIDIA A10 (simulated)", **card) == 1
    assert value(found, "mgpu_device_up", **card) == 1
    assert value(found, "mgpu_device_compute_policy", **card) == 0
    assert value(found, "mgpu_device_compute_weight", online="true", **card) == 30
    assert value(found, "mgpu_device_compute_weight", online="false", **card) == 5
    assert value(found, "mgpu_device_instances", **card) == 2
    assert value(found, "mgpu_device_vmem_total_bytes", **card) == 23028 * MIB
    assert value(found, "mgpu_device_vmem_limit_bytes", **card) == 5120 * MIB
    assert value(found, "mgpu_device_vmem_free_bytes", **card) == 17908 * MIB
    assert value(found, "mgpu_device_vmem_used_bytes", **card) == 12345
    assert value(found, "mgpu_device_utilisation_ratio", **card) == 0.25
    assert value(found, "mgpu_agent_info", version="0.1.0", tracker="cuda", enforcer="kill") == 1


def test_what_ended_leaves_no_figure(node: Node) -> None:
    node.bind("aaaa", device=0)
    node.use("aaaa", PidUse(7, MIB))
    assert count(samples(node), "mgpu_process_vmem_used_bytes") == 1
    node.use("aaaa")
    found = samples(node)
    assert count(found, "mgpu_process_vmem_used_bytes") == 0
    assert value(found, "mgpu_container_vmem_used_bytes") == 0
    node.uses.clear()
    found = samples(node)
    assert count(found, "mgpu_container_vmem_used_bytes") == 0
    assert value(found, "mgpu_container_vmem_limit_bytes") == 4096 * MIB
    node.service.release("aaaa")
    assert not [name for name, _ in samples(node) if name.startswith("mgpu_container")]


def test_a_lost_card_is_down_without_figures(node: Node) -> None:
    node.cards.lost[A10.uuid] = "NVML says: GPU is lost"
    found = samples(node)
    assert value(found, "mgpu_device_up", device_id="0") == 1
    assert value(found, "mgpu_device_up", device_id="1") == 0
    assert count(found, "mgpu_device_vmem_used_bytes") == 1
    assert count(found, "mgpu_device_utilisation_ratio") == 1


def test_without_nvml_the_containers_are_still_served(node: Node) -> None:
    node.bind("aaaa")
    node.cards.missing = True
    found = samples(node)
    assert value(found, "mgpu_container_compute_weight") == 30
    assert count(found, "mgpu_device_up") == 0


def test_page_and_code_agree() -> None:
    text = (DOCS / "metrics.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `mgpu_")]
    told = {row[0].strip("| `"): row for row in rows}
    served = {spec.name + ("_total" if spec.kind == "counter" else ""): spec for spec in METRICS}
    assert list(told) == list(served)
    for name, spec in served.items():
        assert told[name][1] == spec.kind
        assert tuple(re.findall(r"`(\w+)`", told[name][2])) == spec.labels, name


def test_every_family_is_there_and_no_other(node: Node) -> None:
    node.bind("aaaa", device=0)
    node.use("aaaa", PidUse(7, MIB))
    node.cards.processes = {H200.uuid: {7: MIB}}
    families = {f.name: f for f in text_string_to_metric_families(page(node))}
    assert set(families) == {spec.name for spec in METRICS}
    for spec in METRICS:
        assert families[spec.name].type == spec.kind
        for sample in families[spec.name].samples:
            assert set(sample.labels) == set(spec.labels)


def test_names_follow_the_conventions() -> None:
    for spec in METRICS:
        assert spec.name.startswith("mgpu_")
        assert spec.help.endswith(".")
        if "vmem" in spec.name and spec.kind == "gauge":
            assert spec.name.endswith("_bytes")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: apt prometheus")
def test_promtool_has_nothing_to_say(tmp_path: Path) -> None:
    node = Node(tmp_path)
    fill(node, containers=20, pids=2)
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=page(node).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"")


# Over TCP


@pytest.fixture
def port(node: Node) -> Iterator[int]:
    metrics = Metrics(node.figures)
    site = metrics.site("127.0.0.1", 0)
    server = HttpServer([site])
    port = site.listener.getsockname()[1]
    server.start()
    yield port
    server.stop()
    metrics.stop()


def test_over_tcp(node: Node, port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert b"mgpu_agent_info" in answer.read()


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/metrics", "POST", 405)]
)
def test_nothing_else_is_served(port: int, path: str, method: str, status: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    assert raised.value.code == status


def test_port_that_is_taken(port: int) -> None:
    with pytest.raises(ConfigInvalid, match=f"127.0.0.1:{port}: the port is taken"):
        tcp_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigInvalid, match="metrics_listen"):
        tcp_socket(host, 19735)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback address here")
def test_ipv6() -> None:
    with tcp_socket("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"
        with pytest.raises(ConfigInvalid, match=r"\[::1\]:"):
            tcp_socket("::1", listener.getsockname()[1])
