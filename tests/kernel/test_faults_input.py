"""Bad requests at a running agent: one line, a stable exit code, and nothing changed."""

import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from tests.lab import MIB, Tenant, v2_mount, wait_for

from mgpu import bpf
from mgpu.client import Client

SHARE = ("--device", "0", "--core", "5", "--memory", "1024")
GONE = 2**22 - 1  # the largest PID there can be is one less (proc(5), pid_max)


@pytest.fixture(scope="module")
def agent(module_node):
    module_node.start_agent()
    return module_node


@pytest.fixture
def cgroup(agent):
    path = v2_mount() / f"{agent.folder.name}-faults"
    path.mkdir()
    yield path
    path.rmdir()
    assert wait_for(lambda: not agent.containers())


# Figures that change by themselves, as processes and the driver go on.
LIVE = ("vmem_info", "tasks", "denials", "kills", "vmem_used_bytes", "utilisation_ratio")


def lasting(rows):
    return [{key: value for key, value in row.items() if key not in LIVE} for row in rows]


def state(agent):
    """All that a request could change: the ledger's view, maps, nodes, cgroups."""
    maps = {}
    for name in ("bound", "limits"):
        (path,) = agent.bpf_root.glob(f"*/maps/{name}")
        opened = bpf.Map.pinned(path)
        maps[name] = sorted(opened.items())
        opened.close()
    nodes = sorted(str(path) for path in Path("/dev").glob("mgpu*"))
    groups = sorted(str(path) for path in (v2_mount() / "mgpu").glob("*"))
    client = Client(agent.environment["MGPU_SOCKET"])
    rows = lasting(client.containers()["containers"]), lasting(client.devices()["devices"])
    return rows, maps, nodes, groups


def refused(agent, *words):
    """The exit code and the line of a refusal that changed nothing."""
    before = state(agent)
    done = agent.cli(*words, check=False)
    assert state(agent) == before
    assert done.stdout == ""
    assert re.fullmatch(r"mgpu-cli: [^\n]+; [^\n]+\n", done.stderr), done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("key", ["core", "memory"])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("0", 2),
        ("-1", 2),
        ("30.5", 2),
        ("1e3", 2),
        ("thirty", 2),
        ("", 2),
        ("0x10", 2),
        ("99999999999999999999999", 2),
        ("9223372036854775807", 2),
    ],
)
def test_numbers(agent, cgroup, key, value, code):
    asked = {"core": "30", "memory": "4096", key: value}
    options = [word for name, text in asked.items() for word in (f"--{name}={text}",)]
    assert refused(agent, "bind", f"/{cgroup.name}", *options)[0] == code
    assert refused(agent, "run", *options, "--", "true")[0] == 125


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--core", "101", "--memory", "4096"], 3, "core 101"),
        (["--core", "100000", "--memory", "4096"], 3, "core 100000"),
        (["--core", "30", "--memory", "255"], 3, "memory 255"),
        (["--core", "30", "--memory", "9999999"], 6, "memory 9999999"),
        (["--core", "30"], 3, "memory"),
        (["--core", "900"], 3, "core 900"),
        (["--core", "800"], 6, "core 800"),
        (["--device", "7", "--core", "30", "--memory", "4096"], 4, "7"),
        (["--device", "GPU-none", "--core", "30", "--memory", "4096"], 4, "GPU-none"),
        (["--enforcer", "beg", "--core", "30", "--memory", "4096"], 2, "beg"),
    ],
)
def test_requests_that_break_a_rule_or_find_no_room(agent, cgroup, words, code, named):
    found, said = refused(agent, "bind", f"/{cgroup.name}", *words)
    assert found == code, said
    assert named in said


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("/no/such/cgroup", 4),
        (str(GONE), 4),
        ("0123456789abcdef", 4),
        ("no-such-container", 2),
        ("/", 2),
        ("/../etc", 2),
        ("", 2),
        ("a\nb", 2),
        ("x" * 5000, 2),
    ],
)
def test_targets_that_are_not_there(agent, target, code):
    assert refused(agent, "bind", target, *SHARE)[0] == code


@pytest.mark.parametrize(
    "words",
    [
        ["set", "nobody", "--core", "5"],
        ["release", "nobody"],
        ["container", "info", "nobody"],
        ["device", "info", "9"],
        ["policy", "9", "fixed-share"],
    ],
)
def test_what_is_not_known(agent, words):
    assert refused(agent, *words)[0] == 4


def test_a_process_in_no_cgroup_of_its_own(agent):
    script = f"echo $$ > {v2_mount()}/cgroup.procs; exec sleep 60"
    with subprocess.Popen(["sh", "-c", script]) as sleeper:
        procs = v2_mount() / "cgroup.procs"
        assert wait_for(lambda: str(sleeper.pid) in procs.read_text().split())
        code, said = refused(agent, "bind", str(sleeper.pid), *SHARE)
        sleeper.kill()
    assert code == 2
    assert "no cgroup of its own" in said


def test_a_cgroup_is_bound_once(agent, cgroup):
    agent.cli("bind", f"/{cgroup.name}", *SHARE)
    code, said = refused(agent, "bind", f"/{cgroup.name}", *SHARE)
    assert code == 5
    assert "bound already" in said or "holds instances already" in said
    inner = cgroup / "inner"
    inner.mkdir()
    assert refused(agent, "bind", f"/{cgroup.name}/inner", *SHARE)[0] == 5
    inner.rmdir()


def test_the_seventeenth_instance(agent, cgroup):
    parents = [cgroup / str(i) for i in range(17)]
    for path in parents:
        path.mkdir()
    share = ("--device", "0", "--core", "1", "--memory", "256")
    for path in parents[:16]:
        agent.cli("bind", f"/{cgroup.name}/{path.name}", *share)
    code, said = refused(agent, "bind", f"/{cgroup.name}/16", *share)
    assert code == 6
    assert "16" in said
    for path in parents:
        path.rmdir()


def test_a_limit_below_what_is_in_use(agent):
    tenant = Tenant(agent, "big", *SHARE)
    assert tenant.ask("alloc", 600) == {"result": 0}
    code, said = refused(agent, "set", "big", "--memory", "512")
    assert code == 5
    assert "--force" in said
    assert refused(agent, "release", "big")[0] == 5
    assert tenant.end() == 0


def test_a_killed_run_leaves_its_command_within_its_limits(agent):
    tenant = Tenant(agent, "orphan", *SHARE)
    assert tenant.ask("alloc", 100) == {"result": 0}
    tenant.process.send_signal(signal.SIGKILL)
    assert tenant.process.wait(timeout=10) == -signal.SIGKILL
    assert tenant.ask("alloc", 100) == {"result": 0}
    (used,) = agent.used("orphan").values()
    assert used >= 200 * MIB
    assert tenant.ask("alloc", 2000) == {"result": "killed"}
    assert wait_for(lambda: not agent.containers()), "its instance was not released"
    assert not list((v2_mount() / "mgpu").glob("*"))


HOSTILE = (
    b"\x00\xff\xfe nonsense\r\n\r\n",
    b"GET /v1/status HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"POST /v1/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v1/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nnot json!",
    b"POST /v1/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
    b'POST /v1/containers HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{"target": ',
    b"DELETE /v1/containers/nobody HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /v1/stat",
    b"",
)


def _attack(path, data, answers):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(path)
        try:
            if len(data) < 4096:  # slowly: a few bytes at a time
                for i in range(0, len(data), 16):
                    client.sendall(data[i : i + 16])
            else:
                client.sendall(data)
            answers.append((data, client.recv(65536)))
        except OSError:
            answers.append((data, b""))


def test_two_hundred_hostile_clients_at_once(agent):
    """Each gets a refusal or is dropped; meanwhile others are served, and nothing stays."""
    assert agent.agent is not None
    before, fds = state(agent), Path(f"/proc/{agent.agent.pid}/fd")
    descriptors = len(list(fds.iterdir()))
    answers = []
    clients = [
        threading.Thread(
            target=_attack, args=(agent.environment["MGPU_SOCKET"], HOSTILE[i % 10], answers)
        )
        for i in range(200)
    ]
    for client in clients:
        client.start()
    agent.cli("run", *SHARE, "--", "true")
    assert agent.metrics()
    for client in clients:
        client.join()
    assert len(answers) == 200
    for sent, answer in answers:
        refusal = re.match(rb"HTTP/1\.1 (4\d\d|503|505) ", answer)
        assert refusal or not answer, (sent[:60], answer[:200])
    assert wait_for(lambda: len(list(fds.iterdir())) <= descriptors, 30)
    assert wait_for(lambda: state(agent) == before)
    assert os.path.exists(f"/proc/{agent.agent.pid}")
    assert "Traceback" not in agent.log()
