"""Compiles sources of bpf/ with bcc, pins their programs, and exits: the child of loader.py.

Runs as ``python -m mgpu.probes.compile`` with a job (JSON) on standard input, so that LLVM never
is in the agent's memory. What bcc and the verifier say goes to standard error as it is.
"""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Set

from mgpu import bpf

INCLUDE = re.compile(r'#include "([\w.]+)"')


def flatten(folder: Path, name: str, seen: Set[str]) -> str:
    """The text of ``name`` with what it includes: bcc rewrites map accesses in one file only."""
    if name in seen:
        return ""
    seen.add(name)
    lines: List[str] = [f'#line 1 "{name}"']
    for number, line in enumerate((folder / name).read_text().splitlines(), start=1):
        match = INCLUDE.match(line)
        if match:
            lines += [flatten(folder, match.group(1), seen), f'#line {number + 1} "{name}"']
        else:
            lines.append(line)
    return "\n".join(lines)


def compile_job(job: Dict[str, Any]) -> None:
    """Compile ``job["sources"]`` as one, load each of ``job["programs"]`` and pin it."""
    from bcc import BPF  # type: ignore[import-untyped]

    seen: Set[str] = set()
    text = "\n".join(flatten(Path(job["folder"]), source, seen) for source in job["sources"])
    unit = BPF(text=text, cflags=job["flags"])
    for name, kind in job["programs"].items():
        function = unit.load_func(name, getattr(BPF, kind))
        target = Path(job["target"]) / name
        with contextlib.suppress(FileExistsError):  # a child of a killed agent was quicker
            bpf.obj_pin(function.fd, target)


if __name__ == "__main__":
    compile_job(json.load(sys.stdin))
