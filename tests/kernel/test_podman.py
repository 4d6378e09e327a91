"""A real container (podman, runc) with a real client in it: named, gated, counted, let go."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.lab import BIN, CLIENT, CONTEXT_MIB, MIB, ROOT, SIM, wait_for

from mgpu.cgroups import parse_paths

# This machine's capabilities may lack CAP_SYS_RESOURCE: podman must not raise limits.
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
TRY = (
    "import os,stat,sys\n"
    "for number in sys.argv[1:]:\n"
    "    major, minor = map(int, number.split(':'))\n"
    "    path = '/tmp/' + number\n"
    "    try:\n"
    "        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))\n"
    "        os.close(os.open(path, os.O_RDWR))\n"
    "        print(0)\n"
    "    except OSError as error: print(error.errno)\n"
)


class Podman:
    """Containers over the host's own /usr, in folders of the test's."""

    def __init__(self, folder, node):
        self.folder, self.node, self.names = folder, node, []
        self.root = folder / "rootfs"
        for name in ("dev", "etc", "proc", "sys", "tmp", "usr", str(ROOT)[1:]):
            (self.root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.root / name).symlink_to(f"usr/{name}")

    def command(self, *words):
        command = ["podman", "--storage-driver", "vfs"]  # the overlay one leaves a mount behind
        command += ["--runtime", "runc", "--cgroup-manager", "cgroupfs"]
        for option, name in (("--root", "store"), ("--runroot", "run"), ("--tmpdir", "tmp")):
            command += [option, str(self.folder / name)]
        return [*command, *words]

    def __call__(self, *words):
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=60)

    def start(self, name):
        """A container that sleeps, with both cards as its runtime may give them; its full id."""
        options = ["--name", name, "--network", "none", "--cap-add", "MKNOD", *LIMITS]
        options += ["-v", "/usr:/usr:ro", "-v", f"{ROOT}:{ROOT}:ro"]
        options += ["-v", f"{self.node.sim_dir}:{self.node.sim_dir}"]
        for card in (0, 1):
            options += ["--device", f"/dev/mgpu{card}:/dev/nvidia{card}"]
        for key, value in (("LD_LIBRARY_PATH", SIM), ("MGPU_SIM_DIR", self.node.sim_dir)):
            options += ["-e", f"{key}={value}"]
        command = ["--rootfs", str(self.root), "/usr/bin/sleep", "1000"]
        done = self("run", "-d", *options, *command)
        if done.returncode:
            pytest.skip(f"podman starts no container here: {done.stderr.strip()[-200:]}")
        self.names.append(name)
        return done.stdout.strip()

    def pid(self, name):
        return int(self("inspect", "-f", "{{.State.Pid}}", name).stdout)

    def opens(self, name, *numbers):
        """The errno of opening each number by a node that the container makes itself."""
        wanted = [f"{major}:{minor}" for major, minor in numbers]
        done = self("exec", name, "/usr/bin/python3", "-c", TRY, *wanted)
        for each in wanted:
            (self.root / "tmp" / each).unlink(missing_ok=True)
        return [int(line) for line in done.stdout.split()]

    def client(self, name):
        """tests/client.py in the container: its process here, and a function that asks it."""
        process = subprocess.Popen(
            self.command("exec", "-i", name, str(BIN / "python"), str(CLIENT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def ask(*asked):
            process.stdin.write(" ".join(map(str, asked)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            return json.loads(line)["result"] if line else "killed"

        assert json.loads(process.stdout.readline() or '{"init": -1}') == {"init": 0}
        return process, ask

    def close(self):
        for name in self.names:
            self("rm", "-f", "-t", "0", name)


@pytest.fixture(scope="module")
def podman(module_node, tmp_path_factory):
    for tool in ("podman", "runc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    module_node.start_agent()
    made = Podman(tmp_path_factory.mktemp("podman"), module_node)
    yield made
    made.close()


def _numbers():
    """Those of both cards, nvidiactl and a card that does not exist."""
    major = os.major(os.stat("/dev/mgpu0").st_rdev)
    return [(major, minor) for minor in (0, 1, 255, 7)]


def test_a_container_that_is_not_bound_opens_no_card(podman):
    podman.start("stranger")
    assert wait_for(lambda: podman.opens("stranger", *_numbers()) == [errno.EPERM] * 4, 5)
    assert podman.opens("stranger", (1, 3)) == [0]


def test_bound_used_stopped_and_released(podman, module_node):
    node = module_node
    full_id = podman.start("job")
    said = node.cli("bind", full_id[:12], "--device", "0", "--core", "30", "--memory", "1024")
    assert full_id[:12] in said.stdout
    pid = podman.pid("job")
    # It is the same container by its id, by a process in it, and by its cgroup.
    unified = parse_paths(Path(f"/proc/{pid}/cgroup").read_text())["unified"]
    for target in (full_id, str(pid), unified):
        again = node.cli("bind", target, "--core", "30", "--memory", "1024", check=False)
        assert (again.returncode, full_id[:12] in again.stderr) == (5, True)
    assert podman.opens("job", *_numbers()) == [
        errno.ENXIO, errno.EPERM, errno.ENXIO, errno.EPERM,
    ]  # fmt: skip

    client, ask = podman.client("job")
    assert ask("count") == 0
    assert ask("alloc", 500) == 0
    assert node.used(node.containers()[0]["name"]) == {0: (500 + CONTEXT_MIB) * MIB}
    (held,) = node.containers()[0]["vmem_info"]["pids"]
    # A PID of the host, though the client sees another one of its own.
    assert str(BIN / "python") in Path(f"/proc/{held['pid']}/cmdline").read_text()
    assert ask("alloc", 500) == "killed"
    client.wait()
    assert wait_for(lambda: node.containers()[0]["vmem_info"]["used_bytes"] == 0)

    podman("rm", "-f", "-t", "0", "job")
    assert wait_for(lambda: node.containers() == [])


def test_a_released_container_opens_no_card(podman, module_node):
    """The guard closes what the release opens."""
    full_id = podman.start("left")
    module_node.cli("bind", full_id, "--core", "30", "--memory", "1024")
    module_node.cli("release", full_id[:12])
    assert podman.opens("left", *_numbers()) == [errno.EPERM] * 4
