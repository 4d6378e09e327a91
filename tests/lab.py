"""This machine as a node with simulated cards: an agent of its own, its client, its tenants.

Used by the demo, the tests against this kernel and the benchmarks. Everything but the cards is
real; every lab has folders, a BPF root, a metrics port and a configuration of its own.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / "build/venv/bin"
SIM = ROOT / "build/sim"
CLIENT = Path(__file__).with_name("client.py")
MIB = 1024 * 1024
START_TIMEOUT_S = 180  # compiling takes long where the processor is emulated
CONTEXT_MIB = 256
LOCK = Path(tempfile.gettempdir()) / "mgpu-lab.lock"

CONFIG = """[agent]
state = {folder}/state.db
socket = {folder}/agent.sock
run_dir = {folder}
bpf_root = {bpf_root}
metrics_listen = 127.0.0.1:{port}
group = root
context_mib = {context_mib}
simulation = yes
"""


class LabError(Exception):
    """Something of the lab itself did not work."""


def wait_for(truth: Callable[[], object], seconds: float = 10.0) -> bool:
    """Whether ``truth`` became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if truth():
            return True
        time.sleep(0.02)
    return bool(truth())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def v2_mount() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            return Path(line.split()[4])
    raise LabError("no cgroup2 hierarchy is mounted")


def leftovers(bpf_root: Path) -> List[str]:
    """Traces of an agent on this machine."""
    found = [str(path) for path in Path("/dev").glob("mgpu*")]
    found += [
        str(path)
        for path in Path("/dev/char").glob("*")
        if path.is_symlink() and "mgpu" in os.readlink(path)
    ]
    return found + [str(p) for p in (bpf_root, v2_mount() / "mgpu") if p.exists()]


class Tenant:
    """A client started by `mgpu-cli run`, driven over its standard input."""

    def __init__(self, node: "Node", name: str, *options: str) -> None:
        command = [str(BIN / "mgpu-cli"), "run", "--name", name, *options, "--"]
        self.process = node.start([*command, str(BIN / "python"), str(CLIENT)])
        self.name = name
        self.init = int(self.read().get("init", -1))

    def read(self) -> Dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"result": "killed"}

    def ask(self, *words: object) -> Dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=10)


class Node:
    """One agent and what belongs to it. ``keys`` are further lines of agent.conf."""

    def __init__(self, sim_conf: str = "", **keys: object) -> None:
        # /dev and the cgroup /mgpu are the machine's: one lab at a time.
        self._turn = open(LOCK, "a")  # noqa: SIM115  (held until close)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        self.folder = Path(tempfile.mkdtemp(prefix="mgpu-lab-"))
        self.bpf_root = Path("/sys/fs/bpf") / self.folder.name
        self.port = free_port()
        self.config = self.folder / "agent.conf"
        self.sim_dir = self.folder / "sim"
        self.sim_dir.mkdir()
        if sim_conf:
            (self.sim_dir / "sim.conf").write_text(sim_conf)
        self.configure(**keys)
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(SIM),
            "MGPU_SIM_DIR": str(self.sim_dir),
            "MGPU_SOCKET": str(self.folder / "agent.sock"),
        }
        self.agent: Optional[subprocess.Popen[bytes]] = None

    def configure(self, **keys: object) -> None:
        """Write agent.conf: the lab's own keys, ``keys`` over them."""
        text = CONFIG.format(
            folder=self.folder, bpf_root=self.bpf_root, port=self.port, context_mib=CONTEXT_MIB
        )
        lines = [x for x in text.splitlines() if x.partition(" =")[0] not in keys]
        lines += [f"{key} = {value}" for key, value in keys.items()]
        self.config.write_text("\n".join(lines) + "\n")

    def start(self, command: List[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )

    def start_agent(self, command: Optional[List[str]] = None) -> float:
        """Start it (by another ``command``, if given); seconds until it answers."""
        begun = time.monotonic()
        with open(self.folder / "agent.log", "ab") as log:
            self.agent = subprocess.Popen(
                command or [str(BIN / "mgpu-agent"), "--config", str(self.config), "run"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while not self.answers():
            if self.agent.poll() is not None or time.monotonic() - begun > START_TIMEOUT_S:
                raise LabError("the agent does not start:\n" + self.log())
            time.sleep(0.02)
        return time.monotonic() - begun

    def answers(self) -> bool:
        """Whether the agent is ready: its API takes connections before, and answers then."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.5)
            try:
                probe.connect(self.environment["MGPU_SOCKET"])
                probe.sendall(b"GET /v1/status HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n")
                return probe.recv(64).startswith(b"HTTP/1.1 200")
            except OSError:
                return False

    def stop_agent(self, signal_number: int = 15) -> int:
        """Send a signal and wait; its exit status."""
        assert self.agent is not None
        self.agent.send_signal(signal_number)
        return self.agent.wait(timeout=20)

    def teardown(self) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(BIN / "mgpu-agent"), "--config", str(self.config), "teardown"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def close(self) -> None:
        """End the agent, take every trace away, remove the folders."""
        if self.agent is not None and self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        self.teardown()
        shutil.rmtree(self.folder)
        self._turn.close()

    def sim(self, *words: str) -> str:
        """The simulation's own command line: the truth that figures are held against."""
        return subprocess.run(
            [str(SIM / "mgpu-sim"), *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def cli(self, *words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [str(BIN / "mgpu-cli"), *words],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        if check and done.returncode != 0:
            raise LabError(f"mgpu-cli {' '.join(words)}: {done.stderr}{self.log()}")
        return done

    def containers(self) -> List[Dict[str, Any]]:
        """The rows of `container info`, one for each instance."""
        said = json.loads(self.cli("container", "info", "-o", "json").stdout)
        rows: List[Dict[str, Any]] = said["containers"]
        return rows

    def used(self, name: str) -> Dict[int, int]:
        """Bytes that the container called ``name`` uses, by device."""
        return {
            row["device_id"]: row["vmem_info"]["used_bytes"]
            for row in self.containers()
            if row["name"] == name
        }

    def metrics(self) -> Dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
            text = page.read().decode()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if not line.startswith("#")
        }

    def metric(self, name: str, **labels: object) -> float:
        for key, value in self.metrics().items():
            if key.startswith(name + "{") and all(f'{k}="{v}"' in key for k, v in labels.items()):
                return value
        return -1

    def driver_used(self) -> Dict[int, int]:
        """What NVML's clients see of each card, by `nvidia-ml-py` in a process of its own."""
        code = (
            "import json,pynvml as n;n.nvmlInit();"
            "h=[n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())];"
            "print(json.dumps([sum(p.usedGpuMemory for p in "
            "n.nvmlDeviceGetComputeRunningProcesses(x)) for x in h]))"
        )
        done = subprocess.run(
            [str(BIN / "python"), "-c", code],
            env=self.environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        return dict(enumerate(json.loads(done.stdout)))
