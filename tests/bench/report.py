"""The table of docs/benchmarks.md, from the figures of one run."""

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

HEAD = """# Benchmarks

Written by `sudo make bench`. {processor}, {cores} cores, kernel {kernel}, Python {python}, {date}.
The cards are simulated; device nodes, cgroups, eBPF and processes are real. Times are medians; what
is compared was measured in turns within the same run.

| what | measured | wanted |
|---|---|---|
"""


class Row(NamedTuple):
    what: str
    measured: Callable[[Dict[str, float]], str]
    wanted: str = ""


def _pair(f: Dict[str, float]) -> str:
    plain = f["pair_without_probes_ns"]
    return (
        f"{plain / 1000:.2f} µs without probes; "
        f"probed: {f['pair_probed_unbound_ns'] / 1000:.2f} µs "
        f"({f['pair_probed_unbound_ns'] - plain:+.0f} ns) outside any container, "
        f"{f['pair_bound_ns'] / 1000:.2f} µs ({f['pair_bound_ns'] - plain:+.0f} ns) in one"
    )


def _open(name: str) -> Callable[[Dict[str, float]], str]:
    def text(f: Dict[str, float]) -> str:
        free, gated = f[f"open_{name}_without_gate_ns"], f[f"open_{name}_with_gate_ns"]
        return f"{free:.0f} ns without the gate, {gated:.0f} ns with it ({gated / free:.2f} times)"

    return text


ROWS: List[Row] = [
    Row("cuMemAlloc and cuMemFree, one pair", _pair),
    Row("open() of the card's node", _open("card")),
    Row("open() of /dev/null", _open("null")),
    Row(
        "exactness: 8 processes of 4 threads, every entry point",
        lambda f: (
            f"{f['exact_operations']:.0f} operations, {f['exact_quiet_points']:.0f} quiet points, "
            f"largest difference {f['exact_worst_difference_bytes']:.0f} bytes"
        ),
        "0 bytes",
    ),
    Row(
        "scrape, 128 instances of 8 processes",
        lambda f: f"{f['scrape_ms']:.1f} ms (worst {f['scrape_worst_ms']:.1f})",
        "50 ms",
    ),
    Row(
        "`mgpu-cli container info` of the same, from the shell",
        lambda f: f"{f['container_info_ms']:.0f} ms (worst {f['container_info_worst_ms']:.0f})",
        "300 ms",
    ),
    Row(
        "idle agent with 128 instances",
        lambda f: f"{f['idle_core_percent']:.2f} % of a core",
        "0.5 %",
    ),
    Row(
        "its resident memory, less the state of the simulated cards",
        lambda f: (
            f"{f['idle_rss_mb']:.1f} MB, LLVM {'mapped' if f['llvm_mapped'] else 'not mapped'}; "
            f"{f['rss_crowd_mb']:.1f} MB with 1024 processes followed"
        ),
        "60 MB, not mapped",
    ),
    Row(
        "cold start to ready",
        lambda f: f"{f['cold_start_s']:.2f} s (worst of 3: {f['cold_start_worst_s']:.2f})",
        "3 s",
    ),
    Row("restart", lambda f: f"{f['restart_s']:.2f} s", "1 s"),
    Row(
        "containers bound and vanished, one after the other",
        lambda f: (
            f"{f['vanishing_containers']:.0f} in {f['vanishing_seconds']:.0f} s; left behind: "
            f"{f['leaked_descriptors']:.0f} descriptors, "
            f"{f['leaked_map_entries']:.0f} map entries, "
            f"{f['leaked_nodes']:.0f} nodes, {f['leaked_rss_mb']:.1f} MB"
        ),
        "nothing (but the names of the last 8192 instances, some 2 MB)",
    ),
]


def write(path: Path, machine: Dict[str, Any], figures: Dict[str, float]) -> None:
    """Write the page anew."""
    lines = [f"| {row.what} | {row.measured(figures)} | {row.wanted} |" for row in ROWS]
    path.write_text(HEAD.format(**machine) + "\n".join(lines) + "\n")
