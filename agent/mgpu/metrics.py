"""/metrics for Prometheus, read from the figures at each scrape.

METRICS is the list of everything served; docs/metrics.md explains it, and a test holds the two
together. No gauge lives between scrapes, so none can be stuck at the figure of a process that
ended: what has no figure now is absent.
"""

from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mgpu.figures import Figures
from mgpu.http_message import HttpAnswer, HttpRefusal, HttpRequest
from mgpu.httpd import Lane, Site
from mgpu.listen import tcp_socket
from mgpu.views import Row

SCRAPES_WAITING = 64

_AGENT = ("version", "tracker", "enforcer", "simulated")
_DEVICE = ("device_id", "device_uuid", "simulated")
# Names go into an info metric, to be joined on: labels are most of what a scrape costs. And
# "instance" alone would clash with Prometheus's own label for the scraped target.
_INSTANCE = ("container_id", "device_id", "instance_id", "simulated")
_INFO = ("container_id", "pod_uid", "name", "origin", "enforcer")
_PROCESS = (*_INSTANCE, "pid")


class Spec(NamedTuple):
    """A metric as Prometheus sees it; counters are served with ``_total`` at their end."""

    name: str
    kind: str
    help: str
    labels: Tuple[str, ...]


METRICS: Sequence[Spec] = (
    Spec("mgpu_agent_info", "gauge", "What this agent is; always 1.", _AGENT),
    Spec("mgpu_agent_start_time_seconds", "gauge", "When it started, since the epoch.", ()),
    Spec("mgpu_device_info", "gauge", "The name of a device; always 1.", (*_DEVICE, "name")),
    Spec("mgpu_device_up", "gauge", "1: the driver answers for it; 0: it is lost.", _DEVICE),
    Spec("mgpu_device_compute_policy", "gauge", "0 fixed, 1 guaranteed, 2 native.", _DEVICE),
    Spec("mgpu_device_compute_weight", "gauge", "Percent given out.", (*_DEVICE, "online")),
    Spec("mgpu_device_instances", "gauge", "Instances given out, of 16.", _DEVICE),
    Spec("mgpu_device_vmem_total_bytes", "gauge", "Memory of the card.", _DEVICE),
    Spec("mgpu_device_vmem_limit_bytes", "gauge", "Memory given out.", _DEVICE),
    Spec("mgpu_device_vmem_free_bytes", "gauge", "Memory still to be given out.", _DEVICE),
    Spec("mgpu_device_vmem_used_bytes", "gauge", "Memory in use, the driver says.", _DEVICE),
    Spec("mgpu_device_utilisation_ratio", "gauge", "Part of the time with a kernel.", _DEVICE),
    Spec("mgpu_container_info", "gauge", "Names of a container; always 1.", _INFO),
    Spec("mgpu_container_compute_weight", "gauge", "Percent of the device's time.", _INSTANCE),
    Spec("mgpu_container_online", "gauge", "1: online; 0: offline.", _INSTANCE),
    Spec("mgpu_container_vmem_limit_bytes", "gauge", "Memory it may use.", _INSTANCE),
    Spec("mgpu_container_vmem_used_bytes", "gauge", "Memory it uses.", _INSTANCE),
    Spec("mgpu_container_vmem_free_bytes", "gauge", "Memory it has left; not below 0.", _INSTANCE),
    Spec("mgpu_container_vmem_denials", "counter", "Allocations over the limit.", _INSTANCE),
    Spec("mgpu_container_kills", "counter", "Processes killed for them.", _INSTANCE),
    Spec("mgpu_process_vmem_used_bytes", "gauge", "Memory that a process uses.", _PROCESS),
    Spec(
        "mgpu_vmem_tracker_difference_bytes",
        "gauge",
        "The driver's figure less the tracker's, over the processes that both know.",
        _INSTANCE,
    ),
)
_KINDS: Mapping[str, Callable[..., Metric]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


class AgentCollector(Collector):
    """Builds every family anew for each scrape."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """The families of METRICS, in that order."""
        page = _Page()
        self._agent(page)
        cards = self._figures.seen_cards()
        for row in self._figures.device_rows() if cards else []:
            _device(page, row)
        simulated = {card.device.uuid: card.device.simulated for card in cards}
        rows = self._figures.container_rows()
        for row in {str(row["id"]): row for row in rows}.values():
            names = (row["id"], row["pod_uid"] or "", row["name"] or "", row["origin"])
            page.add("mgpu_container_info", [str(v) for v in (*names, row["enforcer"])], 1)
        for row in rows:
            _instance(page, row, simulated.get(str(row["device_uuid"]), False))
        return page.families.values()

    def _agent(self, page: "_Page") -> None:
        facts = self._figures.facts()
        labels = (facts.version, facts.tracker, facts.enforcer.value, _bool(facts.simulated))
        page.add("mgpu_agent_info", labels, 1)
        page.add("mgpu_agent_start_time_seconds", (), facts.started_at_s)


class Metrics:
    """The page on its own TCP socket: one scrape at a time, a few waiting, the others refused."""

    def __init__(self, figures: Figures) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(AgentCollector(figures))
        self._lane = Lane("scrape", 1, SCRAPES_WAITING)

    def site(self, host: str, port: int) -> Site:
        """/metrics at an address. Raises ConfigInvalid when it cannot be had."""
        return Site(tcp_socket(host, port), self.answer, lambda request: self._lane)

    def stop(self) -> None:
        """After the server: waits for what still runs."""
        self._lane.stop()

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """The page, for GET /metrics. Raises HttpRefusal for anything else."""
        asked = f"{request.method} {request.path[:80]!r}"
        if request.path != "/metrics":
            raise HttpRefusal(404, asked, "no such path", "GET /metrics")
        if request.method != "GET":
            refusal = HttpRefusal(405, asked, "no such method there", "GET /metrics")
            refusal.headers["Allow"] = "GET"
            raise refusal
        return HttpAnswer(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)


class _Page:
    def __init__(self) -> None:
        self.families: Dict[str, Metric] = {
            spec.name: _KINDS[spec.kind](spec.name, spec.help, labels=spec.labels)
            for spec in METRICS
        }

    def add(self, name: str, labels: Sequence[str], value: object) -> None:
        """A sample; none where there is no figure."""
        if value is not None:
            family = cast(GaugeMetricFamily, self.families[name])
            family.add_metric(labels, float(cast(float, value)))


def _device(page: _Page, row: Row) -> None:
    labels = (str(row["device_id"]), str(row["device_uuid"]), _bool(row["simulated"]))
    page.add("mgpu_device_info", (*labels, str(row["device_name"])), 1)
    page.add("mgpu_device_up", labels, row["device_state"] == "ok")
    page.add("mgpu_device_compute_policy", labels, row["compute_policy"])
    page.add("mgpu_device_compute_weight", (*labels, "true"), row["compute_weight_online"])
    page.add("mgpu_device_compute_weight", (*labels, "false"), row["compute_weight_offline"])
    page.add("mgpu_device_instances", labels, row["instances"])
    page.add("mgpu_device_vmem_total_bytes", labels, row["vmem_total_bytes"])
    page.add("mgpu_device_vmem_limit_bytes", labels, row["vmem_limit_bytes"])
    page.add("mgpu_device_vmem_free_bytes", labels, row["vmem_free_bytes"])
    page.add("mgpu_device_vmem_used_bytes", labels, row["vmem_used_bytes"])
    page.add("mgpu_device_utilisation_ratio", labels, row["utilisation_ratio"])


def _instance(page: _Page, row: Row, simulated: bool) -> None:
    container = str(row["id"])
    labels = (container, str(row["device_id"]), str(row["instance_id"]), _bool(simulated))
    page.add("mgpu_container_compute_weight", labels, row["compute_weight_native_burst"])
    page.add("mgpu_container_online", labels, row["online"])
    page.add("mgpu_container_vmem_limit_bytes", labels, row["vmem_limit_bytes"])
    page.add("mgpu_container_vmem_denials", labels, row["denials"])
    page.add("mgpu_container_kills", labels, row["kills"])
    info = cast(Row, row["vmem_info"])
    if info is None:
        return
    page.add("mgpu_container_vmem_used_bytes", labels, info["used_bytes"])
    page.add("mgpu_container_vmem_free_bytes", labels, info["free_bytes"])
    pids = cast(List[Row], info["pids"])
    for pid in pids:
        page.add("mgpu_process_vmem_used_bytes", (*labels, str(pid["pid"])), pid["used_bytes"])
    page.add("mgpu_vmem_tracker_difference_bytes", labels, _difference(pids))


def _difference(pids: Sequence[Row]) -> int:
    known = [pid for pid in pids if pid["driver_bytes"] is not None]
    return sum(cast(int, pid["driver_bytes"]) - cast(int, pid["tracked_bytes"]) for pid in known)


def _bool(value: object) -> str:
    return "true" if value else "false"
