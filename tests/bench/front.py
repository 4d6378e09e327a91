"""Scrape and ``container info`` of 128 instances with 8 processes each.

The ledger, the API, the CLI and the page are the real ones, in a process of their own; the figures
of tracker and driver come from memory. ``measure`` gives milliseconds, from outside, as Prometheus
and a shell see them.
"""

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List

from tests.unit.front_doubles import Node, fill

INSTANCES = 128
PIDS_EACH = 8
SCRAPES = 30
LISTINGS = 15


def measure() -> Dict[str, float]:
    """Median and worst of each, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.front", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None and server.stdin is not None
            port = int(server.stdout.readline())
            scrapes = _times(SCRAPES, lambda: _scrape(port))
            listings = _times(LISTINGS, lambda: _list(folder))
            server.stdin.close()
    return {
        "scrape_ms": statistics.median(scrapes),
        "scrape_worst_ms": max(scrapes),
        "container_info_ms": statistics.median(listings),
        "container_info_worst_ms": max(listings),
    }


def _times(count: int, work: Callable[[], None]) -> List[float]:
    work()
    found = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        found.append(1000 * (time.perf_counter() - start))
    return found


def _scrape(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")
        size = 0
        while True:
            part = connection.recv(1 << 20)
            if not part:
                break
            size += len(part)
    assert size > INSTANCES * PIDS_EACH * 100


def _list(folder: str) -> None:
    client = Path(sys.executable).with_name("mgpu-cli")
    command = [str(client), "--socket", f"{folder}/agent.sock", "container", "info"]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    assert shown.count(b"PID ") == INSTANCES * PIDS_EACH


def _serve(folder: Path) -> None:
    """Until standard input ends."""
    from mgpu.api import Api
    from mgpu.httpd import HttpServer
    from mgpu.metrics import Metrics

    node = Node(folder)
    fill(node, INSTANCES, PIDS_EACH)
    api, metrics = Api(node.service), Metrics(node.figures)
    page = metrics.site("127.0.0.1", 0)
    server = HttpServer([api.site(str(folder / "agent.sock"), "root"), page])
    server.start()
    print(page.listener.getsockname()[1], flush=True)
    sys.stdin.read()
    server.stop()
    api.stop()
    metrics.stop()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
