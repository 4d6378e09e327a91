"""The eBPF programs and maps of this node: made once, pinned, found again at every start.

Everything lies under one folder of the BPF file system:
    maps/NAME                 the maps, which outlive every program
    programs/GENERATION/NAME  programs by the hash of what they were made of
    links/GENERATION/NAME     what attaches them (attachments.py)
Programs count only while settings.generation is theirs. A new generation is attached first, made
the one that counts by one write, and the old one is taken away after that: at no moment is none
attached, and none counts twice.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from ctypes import sizeof
from pathlib import Path
from typing import Dict, List

from mgpu import bpf, log
from mgpu.errors import NotCapable
from mgpu.probes import headers
from mgpu.probes.layout import MAPS
from mgpu.probes.tracepoints import Tracepoints

# Kind of each program, in bcc's words. What they are attached to stands in cuda.py and follow.py.
PROGRAMS: Dict[str, Dict[str, str]] = {
    "gate.c": {"mgpu_gate": "CGROUP_DEVICE"},
    "process.c": {
        "mgpu_task_freed": "TRACEPOINT",
        "mgpu_task_exit": "TRACEPOINT",
        "mgpu_task_exec": "TRACEPOINT",
        "mgpu_task_fork": "TRACEPOINT",
        "mgpu_task_attach": "TRACEPOINT",
        "mgpu_command": "SOCKET_FILTER",
    },
    "cuda.c": dict.fromkeys(
        (
            "mgpu_alloc",
            "mgpu_pitch",
            "mgpu_array",
            "mgpu_array3d",
            "mgpu_mipmap",
            "mgpu_alloc_end",
            "mgpu_create",
            "mgpu_free",
            "mgpu_release",
            "mgpu_free_end",
            "mgpu_retain",
            "mgpu_retain_end",
            "mgpu_map",
            "mgpu_map_end",
            "mgpu_unmap",
            "mgpu_unmap_end",
        ),
        "KPROBE",
    ),
    "context.c": dict.fromkeys(
        (
            "mgpu_ctx_push",
            "mgpu_ctx_set",
            "mgpu_ctx_pop",
            "mgpu_ctx_create",
            "mgpu_ctx_create3",
            "mgpu_ctx_create4",
            "mgpu_ctx_create_end",
            "mgpu_primary",
            "mgpu_primary_end",
            "mgpu_ctx_destroy",
            "mgpu_ctx_destroy_end",
            "mgpu_primary_drop",
            "mgpu_primary_reset",
            "mgpu_primary_drop_end",
            "mgpu_uuid",
            "mgpu_uuid_end",
        ),
        "KPROBE",
    ),
}
# The slowest first: sources are compiled side by side.
ORDER = ("cuda.c", "context.c", "process.c", "gate.c")
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
        self.generation = 0

    def ensure(self) -> bool:
        """Make sure that maps and programs are there; whether anything had to be compiled.

        Raises NotCapable: no root, no BPF file system, no bcc, no headers, or a program refused.
        """
        self._mount()
        flags = self._flags()
        self.generation = self._hash(flags)
        self._open_maps()
        missing = [source for source in ORDER if not self._is_loaded(source)]
        if missing:
            self._compile(missing, flags)
        return bool(missing)

    def program(self, name: str) -> int:
        """The descriptor of a program of this generation; the loader's own, do not close it."""
        if name not in self._programs:
            self._programs[name] = bpf.obj_get(self._folder / name)
        return self._programs[name]

    def map(self, name: str) -> bpf.Map:
        return self._maps[name]

    def retire(self) -> List[str]:
        """Take the programs of other generations away; their names."""
        folder = self._root / "programs"
        old = [entry.name for entry in folder.iterdir() if entry != self._folder]
        for name in old:
            shutil.rmtree(folder / name)
        return old

    def close(self) -> None:
        """Close the descriptors; what is pinned stays."""
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
    def _folder(self) -> Path:
        return self._root / "programs" / f"{self.generation:016x}"

    def _mount(self) -> None:
        if os.geteuid() != 0:
            raise NotCapable("eBPF", "needs root", "run the agent as root")
        base = self._root.parent
        try:
            if not bpf.is_bpffs(base):
                base.mkdir(parents=True, exist_ok=True)
                bpf.mount("bpf", base)
            for part in ("maps", "programs", "links"):
                (self._root / part).mkdir(parents=True, exist_ok=True)
            self._root.chmod(0o700)
        except OSError as error:
            raise NotCapable(
                f"BPF file system at {base}",
                f"cannot be used ({error.strerror})",
                f"mount it: mount -t bpf bpf {base}",
            ) from error

    def _flags(self) -> List[str]:
        defines = {"MAP_ROOT": f'"{self._root}/maps"', **self._tracepoints.offsets()}
        # A header of bcc's own redefines what some kernels' headers define too.
        return [f"-D{key}={value}" for key, value in sorted(defines.items())] + [
            "-Wno-macro-redefined",
            "-Wno-unused-function",
        ]

    def _hash(self, flags: List[str]) -> int:
        digest = hashlib.sha256("\0".join(flags).encode())
        for path in sorted(self._source.glob("*.[ch]")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return int.from_bytes(digest.digest()[:8], "big") or 1

    def _open_maps(self) -> None:
        """Open the pinned maps, making those that are missing. Other layouts cannot be kept."""
        for attempt in (1, 2):
            if self._open_existing_or_new():
                return
            if attempt == 1:
                log.warning("map-layout-changed", note="counting begins anew, from NVML's figures")
                self.teardown()
                self._mount()
        raise NotCapable("BPF maps", "cannot be made anew", "see the kernel's log")

    def _open_existing_or_new(self) -> bool:
        for name, spec in MAPS.items():
            path = self._root / "maps" / name
            if not path.exists():
                sizes = (sizeof(spec.key), sizeof(spec.value))
                fd = bpf.map_create(
                    spec.map_type, *sizes, spec.max_entries, spec.flags, f"mgpu_{name}"
                )
                bpf.obj_pin(fd, path)
                os.close(fd)
            held = bpf.Map.pinned(path)
            self._maps[name] = held
            now = held.info
            if (now.key_size, now.value_size, now.max_entries) != (
                sizeof(spec.key),
                sizeof(spec.value),
                spec.max_entries,
            ):
                return False
        return True

    def _is_loaded(self, source: str) -> bool:
        return all((self._folder / name).exists() for name in PROGRAMS[source])

    def _compile(self, sources: List[str], flags: List[str]) -> None:
        """One child for each source, side by side."""
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        environment["BCC_KERNEL_SOURCE"] = str(headers.prepare(self._run_dir))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        children = [(source, _start(self._job(source, flags), environment)) for source in sources]
        for source, child in children:
            try:
                _, said = child.communicate(timeout=COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                _, said = child.communicate()
            if child.returncode != 0:
                raise _refused(source, said)

    def _job(self, source: str, flags: List[str]) -> bytes:
        return json.dumps(
            {
                "folder": str(self._source),
                "source": source,
                "programs": PROGRAMS[source],
                "flags": [*flags, f"-DGENERATION={self.generation}ULL"],
                "target": str(self._folder),
            }
        ).encode()


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
