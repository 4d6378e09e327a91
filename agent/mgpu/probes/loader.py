"""The eBPF programs and maps of this node: made once, pinned, found again at every start.

Everything lies under one folder of the BPF file system:
    LAYOUT/maps/NAME                 maps and arrays of programs; they outlive every program
    LAYOUT/programs/GENERATION/NAME  programs, by the hash of what they were made of
    links/NAME                       what attaches to probes (attachments.py)
LAYOUT is a hash of the layout of all maps. Programs of a new generation over the same maps take
the place of the old ones in the arrays (slots.py). Another layout is a set of maps and attachments
of its own beside the old one, which goes on counting and enforcing until ``retire``.
"""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from ctypes import sizeof
from pathlib import Path
from typing import Dict, List, Tuple

from mgpu import bpf, log
from mgpu.errors import NotCapable
from mgpu.probes import headers, helpers, layout, slots
from mgpu.probes.slots import Slots
from mgpu.probes.tracepoints import Tracepoints

# Kind of each program, in bcc's words. What they are attached to stands in cuda.py.
PROGRAMS: Dict[str, Dict[str, str]] = {
    "gate.c": {"mgpu_gate": "CGROUP_DEVICE"},
    "process.c": {
        **dict.fromkeys(slots.TRACEPOINTS, "TRACEPOINT"),
        "mgpu_command": "SOCKET_FILTER",
    },
    "cuda.c": dict.fromkeys((*slots.PROBES[:17], "mgpu_alloc_from"), "KPROBE"),
}
PROGRAMS["context.c"] = {name: "KPROBE" for name in slots.PROBES if name not in PROGRAMS["cuda.c"]}
# Compiled side by side, about as long each; what the sources of one include is read once for both.
Unit = Tuple[str, ...]
UNITS: Tuple[Unit, ...] = (("cuda.c", "gate.c"), ("context.c", "process.c"))
COMPILE_TIMEOUT_S = 120


class Loader:
    """Owns what is pinned under ``pin_root``, save the links."""

    def __init__(
        self, pin_root: Path, source_dir: Path, run_dir: Path, tracepoints: Tracepoints
    ) -> None:
        self._root = pin_root
        self._source = source_dir
        self._run_dir = run_dir
        self._tracepoints = tracepoints
        self._maps: Dict[str, bpf.Map] = {}
        self._programs: Dict[str, int] = {}
        self._generation = ""
        self.slots = Slots(self._maps)

    def ensure(self) -> bool:
        """Make sure that maps and programs are there; whether anything had to be compiled.

        Raises NotCapable: no root, no BPF file system, no bcc, no headers, or a program refused.
        """
        _lift_memlock()
        self._mount()
        flags = self._flags()
        self._generation = self._hash(flags)
        missing = [unit for unit in UNITS if not all(map(self._is_loaded, unit))]
        sources = headers.prepare(self._run_dir) if missing else Path()
        self._open_maps()
        if missing:
            self._compile(missing, flags, sources)
        changed = self.slots.install(self.program)
        if changed:
            log.event("programs-installed", programs=len(changed), generation=self._generation)
        return bool(missing)

    def renew_slots(self) -> None:
        """Cut off everything that is attached: it leads nowhere, and is to be attached anew."""
        for name in slots.ARRAYS:
            self._maps.pop(name).close()
            (self._base / "maps" / name).unlink()
        self.slots.close()
        self._open_maps()
        self.slots.install(self.program)

    def program(self, name: str) -> int:
        """The descriptor of a program of this generation; the loader's own, do not close it."""
        if name not in self._programs:
            self._programs[name] = bpf.obj_get(self._folder / name)
        return self._programs[name]

    def map(self, name: str) -> bpf.Map:
        return self._maps[name]

    def retire(self) -> None:
        """Take the programs of other generations and the maps of other layouts away."""
        for entry in self._root.iterdir():
            if entry not in (self._base, self._root / "links"):
                shutil.rmtree(entry)
        for entry in (self._base / "programs").iterdir():
            if entry != self._folder:
                shutil.rmtree(entry)

    def close(self) -> None:
        """Close the descriptors; what is pinned stays."""
        self.slots.close()
        for fd in self._programs.values():
            os.close(fd)
        for held in self._maps.values():
            held.close()
        self._programs.clear()
        self._maps.clear()

    def teardown(self) -> None:
        """Take everything pinned away."""
        self.close()
        if self._root.is_dir():
            shutil.rmtree(self._root)

    @property
    def _base(self) -> Path:
        return self._root / _layout_hash()

    @property
    def _folder(self) -> Path:
        return self._base / "programs" / self._generation

    def _mount(self) -> None:
        if os.geteuid() != 0:
            raise NotCapable("eBPF", "needs root", "run the agent as root")
        base = self._root.parent
        try:
            if not bpf.is_bpffs(base):
                base.mkdir(parents=True, exist_ok=True)
                bpf.mount("bpf", base)
            self._root.mkdir(mode=0o700, exist_ok=True)
            if self._root.stat().st_uid != 0:
                raise NotCapable(
                    f"BPF folder {self._root}", "belongs to another user than root", "remove it"
                )
            self._root.chmod(0o700)
        except OSError as error:
            raise NotCapable(
                f"BPF file system at {base}",
                f"cannot be used ({error.strerror})",
                f"mount it: mount -t bpf bpf {base}",
            ) from error

    def _flags(self) -> List[str]:
        defines: Dict[str, object] = {"MAP_ROOT": f'"{self._base}/maps"'}
        defines.update(self._tracepoints.offsets())
        defines.update(helpers.defines())
        # A header of bcc's own redefines what some kernels' headers define too.
        return [f"-D{key}={value}" for key, value in sorted(defines.items())] + [
            "-Wno-macro-redefined",
            "-Wno-unused-function",
        ]

    def _hash(self, flags: List[str]) -> str:
        digest = hashlib.sha256("\0".join(flags).encode())
        for path in sorted(self._source.glob("*.[ch]")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def _open_maps(self) -> None:
        """Open the pinned maps, making those that are missing."""
        for part in (self._base / "maps", self._base / "programs", self._root / "links"):
            part.mkdir(parents=True, exist_ok=True)
        for name, spec in {**layout.MAPS, **slots.ARRAYS}.items():
            path = self._base / "maps" / name
            if not path.exists():
                sizes = (sizeof(spec.key), sizeof(spec.value))
                fd = bpf.map_create(
                    spec.map_type, *sizes, spec.max_entries, spec.flags, f"mgpu_{name}"
                )
                bpf.obj_pin(fd, path)
                os.close(fd)
            if name not in self._maps:
                self._maps[name] = bpf.Map.pinned(path)

    def _is_loaded(self, source: str) -> bool:
        return all((self._folder / name).exists() for name in PROGRAMS[source])

    def _compile(self, units: List[Unit], flags: List[str], sources: Path) -> None:
        """One child for each unit, side by side; ``sources`` are the kernel's headers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        environment["BCC_KERNEL_SOURCE"] = str(sources)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        children = [(unit, _start(self._job(unit, flags), environment)) for unit in units]
        for unit, child in children:
            try:
                _, said = child.communicate(timeout=COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                _, said = child.communicate()
            if child.returncode != 0:
                raise _refused(" and ".join(unit), said)

    def _job(self, unit: Unit, flags: List[str]) -> bytes:
        programs = {name: kind for source in unit for name, kind in PROGRAMS[source].items()}
        return json.dumps(
            {
                "folder": str(self._source),
                "sources": unit,
                "programs": programs,
                "flags": flags,
                "target": str(self._folder),
            }
        ).encode()


def _layout_hash() -> str:
    """By which two versions of the agent know that their maps are the same."""
    said = [
        f"{name} {spec.map_type} {spec.max_entries} {spec.flags} "
        f"{layout.describe(spec.key)} {layout.describe(spec.value)}"
        for name, spec in sorted({**layout.MAPS, **slots.ARRAYS}.items())
    ]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _lift_memlock() -> None:
    """Before kernel 5.11 maps count as locked memory; later ones do not look at this limit."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)


def _start(job: bytes, environment: Dict[str, str]) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(
        [sys.executable, "-m", "mgpu.probes.compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert child.stdin is not None
    child.stdin.write(job)
    child.stdin.close()
    child.stdin = None
    return child


def _refused(source: str, said: bytes) -> NotCapable:
    """What bcc or the verifier said is logged whole; the error carries its last line."""
    text = said.decode(errors="replace")
    log.error("bpf-compile-failed", source=source, output=text[-8000:])
    if "No module named 'bcc'" in text:
        return NotCapable(
            "tracker cuda", "bcc's Python module is not installed", "install python3-bpfcc"
        )
    last = [line for line in text.splitlines() if line.strip()][-1:] or ["killed"]
    return NotCapable(f"eBPF source {source}", last[0][:200], "see the journal for the whole log")
