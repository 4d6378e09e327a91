"""The real programs and maps, without an agent, over a library that answers as it is told.

The library has every function that tracker `cuda` probes (their list is the tracker's own); a
puppet (puppet.c) in a bound cgroup calls them. So a test decides what the driver answers.
"""

import os
import signal
import struct
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from tests.lab import v2_mount, wait_for

from mgpu.model import Cgroup, Container, Enforcer, Instance
from mgpu.nodes import Numbers
from mgpu.probes import layout
from mgpu.probes.attachments import PinnedLinks
from mgpu.probes.cuda import CALLS, CudaTracker
from mgpu.probes.loader import Loader
from mgpu.probes.tables import Tables
from mgpu.probes.tracepoints import Tracepoints

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("puppet.c")
CONTEXT = 64 << 20
FAILS = 2  # CUDA_ERROR_OUT_OF_MEMORY, but any will do
# What returns no handle by its first argument.
SILENT = ("Free", "Destroy", "Release", "Reset", "Unmap", "SetCurrent", "PushCurrent", "MemMap")
HEAD = """
static __thread unsigned int result;
static __thread unsigned long long handle;
void stub_say(unsigned int next, unsigned long long made) { result = next; handle = made; }
static unsigned int answer(unsigned long long *out)
{
	if (out && !result) *out = handle;
	return result;
}
"""
PITCH = 1024
UUIDS = (bytes(range(16)), bytes(range(100, 116)))


def properties(location_type, location_id):
    """CUmemAllocationProp: type, handle types, location, and what nobody reads here."""
    return "=" + struct.pack("<IIII16x", 1, 0, location_type, location_id).hex()


def library_text():
    rows = ", ".join("{" + ", ".join(map(str, uuid)) + "}" for uuid in UUIDS)
    lines = [HEAD, f"static const unsigned char uuids[][16] = {{{rows}}};"]
    for name in CALLS:
        out = "0" if any(part in name for part in SILENT) else "out"
        body = f"return answer({out});"
        if "Pitch" in name:
            body = f"if (pitch) *pitch = {PITCH}; {body}"
        if "GetUuid" in name:  # the handle says which card's
            body = "__builtin_memcpy(out, uuids[handle & 1], 16); return result;"
        lines.append(
            f"unsigned int {name}(unsigned long long *out, unsigned long long *pitch) {{ {body} }}"
        )
    return "\n".join(lines)


def build(folder):
    """The library and the puppet; their paths."""
    library, program = folder / "libcuda.so.1", folder / "puppet"
    (folder / "library.c").write_text(library_text())
    flags = ["gcc", "-O1", "-Wall", "-Wno-unused-parameter"]
    subprocess.run(
        [*flags, "-shared", "-fPIC", "-o", str(library), str(folder / "library.c")], check=True
    )
    subprocess.run([*flags, "-pthread", "-o", str(program), str(SOURCE), "-ldl"], check=True)
    return library, program


class Puppet:
    """One process; ``cgroup`` is the folder whose tasks it joins before it begins."""

    def __init__(self, stage, cgroup=None):
        command = [str(stage.program), str(stage.library)]
        if cgroup is not None:
            join = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
            command = ["sh", "-c", join, "puppet", *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, universal_newlines=True
        )
        self.pid = int(self.read())

    def read(self):
        return self.process.stdout.readline().strip()

    def tell(self, *words):
        """Obey one line; the answer, empty when the process has died over it."""
        try:
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.read()

    def call(self, name, *arguments, result=0, handle=0, verb="call"):
        """One call of libcuda; ``result`` and ``handle`` are what the library answers."""
        return self.tell(verb, name, result, handle, *arguments)

    def alloc(self, nbytes, handle, result=0, verb="call"):
        return self.call("cuMemAlloc_v2", "&", nbytes, handle=handle, result=result, verb=verb)

    def free(self, handle, result=0, verb="call"):
        return self.call("cuMemFree_v2", handle, result=result, verb=verb)

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
        return self.process.wait(timeout=10)


class Stage:
    """Programs, maps and probes under a BPF root of their own."""

    def __init__(self, folder):
        self.folder = folder
        self.name = f"mgpu-test-{os.getpid()}-{folder.name}"
        self.library, self.program = build(folder)
        tracepoints = Tracepoints()
        self.pin_root = Path("/sys/fs/bpf") / self.name
        self.loader = Loader(self.pin_root, ROOT / "bpf", folder, tracepoints)
        self.loader.ensure()
        links = PinnedLinks(self.pin_root / "links")
        self.tracker = CudaTracker(self.loader, links, tracepoints, linger_s=0)
        self.tracker.start()
        self.tracker.keep([self.library])
        self.tables = Tables(self.loader)
        self.tables.set_settings(Numbers(0, 0, 0, 0, True), CONTEXT)
        self.tables.set_uuids({UUIDS[0]: 0, UUIDS[1]: 1})
        self._puppets = []
        self._shares = 0

    def close(self):
        self.tracker.detach()
        self.loader.teardown()

    @contextmanager
    def cgroup(self, name):
        path = v2_mount() / f"{self.name}-{name}"
        path.mkdir()
        try:
            yield path
        finally:
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            assert wait_for(lambda: not (path / "cgroup.procs").read_text())
            path.rmdir()

    def puppet(self, cgroup=None):
        puppet = Puppet(self, cgroup)
        self._puppets.append(puppet)
        return puppet

    def end_puppets(self):
        while self._puppets:
            puppet = self._puppets.pop()
            if puppet.process.poll() is None:
                puppet.process.kill()
            puppet.process.wait()
            puppet.process.stdin.close()
            puppet.process.stdout.close()

    def shares(self, count=1):
        """New numbers, never used before."""
        first = self._shares + 1
        self._shares += count
        return tuple(range(first, first + count))

    def bind(self, key, share_ids, limit=1 << 30, enforcer=Enforcer.KILL):
        instances = tuple(
            Instance(share_id, f"card-{minor}", minor, 0, 10, limit)
            for minor, share_id in enumerate(share_ids)
        )
        container = Container("c" * 12, Cgroup(key, unified="/x"), instances)
        minors = {instance.device_uuid: instance.device_index for instance in instances}
        self.tables.bind(key, container, minors, enforcer)

    def release(self, key, share_ids):
        self.tables.unbind(key)
        for share_id in share_ids:
            self.tables.remove_share(share_id)

    def use(self, share_id):
        return self.tables.usage()[share_id]

    def settled(self, share_id, used_bytes):
        """Whether the share comes to use this much soon.

        Tasks are freed a little after their death, and the kernel may pass that event over while
        maps are read (bpf/process.c): then the dead are dropped as the agent would.
        """
        time.sleep(0.05)
        return wait_for(lambda: self.drop_dead() or self.use(share_id).used_bytes == used_bytes)

    def unused_pid(self):
        """A number that no task has now."""
        top = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
        return next(pid for pid in range(top - 500, 300, -1) if not Path(f"/proc/{pid}").exists())

    def pretend(self, pid, share_id, nbytes):
        """Fill the maps as they are when the end of a process that held memory was not seen."""
        process = layout.Process(1, 1, share_id)
        process.share_ids[0] = share_id
        key = bytes(layout.HeldKey(pid, share_id))
        self.loader.map("processes").update(struct.pack("<I", pid), bytes(process))
        self.loader.map("held").update(key, bytes(layout.Held(nbytes)))
        self.loader.map("counts").update(struct.pack("<I", share_id), bytes(layout.Count(nbytes)))

    def drop_dead(self):
        for pid in self.tables.pids():
            if not Path(f"/proc/{pid}").exists():
                self.tables.drop_process(pid)
