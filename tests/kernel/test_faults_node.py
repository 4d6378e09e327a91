"""What may be wrong with a node, or go wrong under a running agent: files, mounts, rights, NVML."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.kernel.conftest import a_node
from tests.lab import BIN, MIB, Tenant, leftovers, wait_for

SHARE = ("--device", "0", "--core", "20", "--memory", "2048")


def mount(*words):
    done = subprocess.run(["mount", *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        pytest.skip(f"mounting (CAP_SYS_ADMIN): {done.stderr.strip()}")


@contextmanager
def disk(path, size="1m"):
    """A tmpfs of our own at ``path``."""
    path.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "mgpu-test", str(path))
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def command(node, *words):
    return [str(BIN / "mgpu-agent"), "--config", str(node.config), *words]


def without(script, node):
    """The agent's command in a mount namespace of its own, after ``script`` has run there."""
    return ["unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh", *command(node, "run")]


def refused(node, started=None, **environment):
    """The exit code and last line of an agent that must not start, and leaves no trace."""
    before = leftovers(node.bpf_root)
    done = subprocess.run(
        started or command(node, "run"),
        env={**node.environment, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout
    assert set(leftovers(node.bpf_root)) - {str(node.bpf_root)} <= set(before)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("mgpu-agent: ") and "; " in last
    return done.returncode, last


# agent.conf


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour = red", "colour"),
        ("reconcile_interval_s = soon", "reconcile_interval_s"),
        ("metrics_listen = 19735", "metrics_listen"),
        ("enforce = beg", "enforce"),
        ("node_owner = nobody-of-that-name", "nobody-of-that-name"),
    ],
)
def test_a_configuration_that_cannot_be_used(node, line, said):
    with open(node.config, "a") as stream:
        stream.write(line + "\n")
    code, last = refused(node)
    assert code == 10
    assert said in last


def test_check_config(node):
    fine = subprocess.run(command(node, "--check-config"), capture_output=True, text=True)
    assert (fine.returncode, fine.stdout) == (0, "configuration is usable\n")
    node.config.write_text("[agent]\ncolour = red\n")
    wrong = subprocess.run(command(node, "--check-config"), capture_output=True, text=True)
    assert wrong.returncode == 10
    assert len(wrong.stderr.splitlines()) == 1
    assert "colour" in wrong.stderr
    node.config.unlink()
    assert refused(node)[0] == 10
    node.config.mkdir()
    assert refused(node)[0] == 10
    node.config.rmdir()
    node.configure()


def test_a_reload_takes_what_is_right_and_refuses_what_is_not(node):
    node.start_agent()
    tenant = Tenant(node, "a", *SHARE)
    assert tenant.ask("alloc", 100) == {"result": 0}
    node.configure(colour="red")
    node.agent.send_signal(signal.SIGHUP)
    assert wait_for(lambda: "reload-refused" in node.log())
    assert tenant.ask("alloc", 100) == {"result": 0}
    node.configure(enforce="observe", state="/elsewhere/state.db", reconcile_interval_s=0.3)
    node.agent.send_signal(signal.SIGHUP)
    assert wait_for(lambda: " reloaded" in node.log())
    assert "reload-needs-restart key=state" in node.log()
    # observe: over the limit and alive, once the maps have it
    assert wait_for(lambda: node.metric("mgpu_agent_info", enforcer="observe") == 1)
    assert wait_for(lambda: node.containers()[0]["enforcer"] == "observe")
    assert tenant.ask("alloc", 4000) == {"result": 0}
    assert tenant.end() == 0
    node.configure()


# The ledger


def snapshot(path):
    return {each.name: each.read_bytes() for each in sorted(path.parent.iterdir())}


@pytest.fixture
def state(node):
    """The ledger in a folder of its own, made by a first run of the agent."""
    path = node.folder / "ledger" / "state.db"
    node.configure(state=path, reconcile_interval_s=0.3, tracker="nvml")
    node.start_agent()
    node.stop_agent()
    assert node.teardown().returncode == 0
    return path


def test_a_corrupt_ledger(node, state):
    state.write_bytes(os.urandom(8192))
    before = snapshot(state)
    code, last = refused(node)
    assert code == 9
    assert str(state) in last and "damaged" in last
    assert snapshot(state) == before


def test_a_ledger_of_a_newer_version(node, state):
    with closing(sqlite3.connect(str(state))) as connection:
        connection.execute("PRAGMA user_version = 99")
    before = snapshot(state)
    code, last = refused(node)
    assert code == 9
    assert "newer" in last
    assert snapshot(state) == before


def test_a_ledger_that_cannot_be_written(node, state):
    folder = state.parent
    script = f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}"
    code, last = refused(node, without(script, node))
    assert code == 9
    assert "read-write" in last


def test_a_ledger_on_a_full_disk_at_start(node):
    with disk(node.folder / "full", "64k") as folder:
        node.configure(state=folder / "state.db")
        with open(folder / "filler", "wb", buffering=0) as stream, pytest.raises(OSError):
            while True:
                stream.write(b"x" * 4096)
        code, last = refused(node)
        assert code == 9
        assert "no space" in last
        node.configure()


def test_a_disk_that_fills_up_under_the_agent(node):
    with disk(node.folder / "small") as folder:
        node.configure(state=folder / "state.db", reconcile_interval_s=0.3)
        node.start_agent()
        tenant = Tenant(node, "before", *SHARE)
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as stream, pytest.raises(OSError):
            while True:
                stream.write(b"x" * 4096)
        for _ in range(50):  # what room SQLite's own files still have
            done = node.cli("run", *SHARE, "--", "true", check=False)
            if done.returncode:
                break
        assert done.returncode == 125
        assert "no space is left" in done.stderr
        assert [row["name"] for row in node.containers()] == ["before"]
        assert tenant.ask("alloc", 100) == {"result": 0}
        filler.unlink()
        node.cli("run", *SHARE, "--", "true")
        assert tenant.end() == 0
        assert wait_for(lambda: not node.containers())
        node.stop_agent()
        assert node.teardown().returncode == 0
        node.configure()


def test_a_ledger_that_vanishes_under_the_agent(node):
    node.start_agent()
    tenant = Tenant(node, "a", *SHARE)
    path = node.folder / "state.db"
    kept = node.folder / "kept.db"
    path.rename(kept)
    done = node.cli("run", *SHARE, "--", "true", check=False)
    assert done.returncode == 125
    assert "replaced or removed" in done.stderr
    assert tenant.ask("alloc", 100) == {"result": 0}
    kept.rename(path)
    assert [row["name"] for row in node.containers()] == ["a"]
    assert tenant.ask("alloc", 4000) == {"result": "killed"}


# Doors


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_socket_path_that_is_taken(node, what):
    path = node.folder / "agent.sock"
    path.mkdir() if what == "folder" else path.write_text("mine")
    code, last = refused(node)
    assert code == 10
    assert str(path) in last
    assert path.is_dir() if what == "folder" else path.read_text() == "mine"


def test_a_socket_that_somebody_answers(node):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(node.folder / "agent.sock"))
        other.listen(5)
        assert refused(node)[0] == 11


def test_a_metrics_port_that_is_taken(node):
    with socket.socket() as other:
        other.bind(("127.0.0.1", node.port))
        other.listen(1)
        code, last = refused(node)
    assert code == 10
    assert str(node.port) in last
    assert not (node.folder / "agent.sock").exists()


def test_a_second_agent(node):
    node.start_agent()
    code, last = refused(node)
    assert code == 11
    assert f"PID {node.agent.pid}" in last
    assert node.teardown().returncode == 11
    node.cli("run", *SHARE, "--", "true")


# Kernel, rights and driver


def test_without_root(node):
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        config = folder / "agent.conf"
        config.write_text("[agent]\n")
        config.chmod(0o644)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        agent = [str(BIN / "mgpu-agent"), "--config", str(config)]
        probe = subprocess.run([*nobody, *agent, "--version"], capture_output=True)
        if probe.returncode:
            pytest.skip("another user cannot read this checkout")
        for word in ("run", "teardown"):
            code, last = refused(node, [*nobody, *agent, word])
            assert code == 12
            assert "root" in last
    finally:
        shutil.rmtree(folder)


def test_a_bpf_file_system_that_is_not_mounted_is_mounted(node):
    script = "while umount -l /sys/fs/bpf 2>/dev/null; do :; done; ! mountpoint -q /sys/fs/bpf"
    node.start_agent(without(script, node))
    tenant = Tenant(node, "a", *SHARE)
    assert tenant.ask("alloc", 100) == {"result": 0}
    assert tenant.ask("alloc", 4000) == {"result": "killed"}
    assert wait_for(lambda: not node.containers())
    # Its programs are pinned in its own mount namespace, out of the reach of another's teardown.
    namespace = ["nsenter", "--mount", "--target", str(node.agent.pid), *command(node, "teardown")]
    sleeper = ["nsenter", "--mount", "--target", str(node.agent.pid), "sleep", "60"]
    with subprocess.Popen(sleeper) as keeps:
        namespace[3] = str(keeps.pid)
        node.stop_agent()
        assert subprocess.run(namespace, env=node.environment).returncode == 0
        keeps.kill()


def test_a_bpf_file_system_that_cannot_be_mounted():
    with a_node(tracker="cuda", bpf_root="/proc/nowhere/mgpu") as node:
        code, last = refused(node)
        assert code == 7
        assert "mount -t bpf" in last


NO_HEADERS = """
for folder in /usr/src /lib/modules; do
    [ ! -d $folder ] || mount -t tmpfs none $folder
done
"""


def check(node, kind, name):
    rows = json.loads(node.cli("check", "-o", "json").stdout)["checks"]
    (row,) = [row for row in rows if (row["kind"], row["name"]) == (kind, name)]
    return row


def test_without_headers_the_figures_are_the_drivers(node):
    node.start_agent(without(NO_HEADERS, node))
    row = check(node, "tracker", "cuda")
    assert not row["available"]
    assert "headers" in row["reason"]
    assert "linux-headers" in row["remedy"]
    assert check(node, "tracker", "nvml")["in_use"]
    assert not check(node, "enforcer", "kill")["available"]
    assert node.metric("mgpu_agent_info", tracker="nvml", enforcer="observe") == 1


def test_without_headers_where_the_tracker_is_insisted_on():
    with a_node(tracker="cuda") as node:
        code, last = refused(node, without(NO_HEADERS, node))
        assert code == 7
        assert "linux-headers" in last


def test_without_nvml(node):
    node.configure(simulation="auto", reconcile_interval_s=0.3)
    node.environment["LD_LIBRARY_PATH"] = ""
    node.start_agent()
    assert not check(node, "cards", "nvml")["available"]
    for words in (["device", "info", "-a"], ["run", *SHARE, "--", "true"]):
        done = node.cli(*words, check=False)
        assert done.returncode in (7, 125)
        assert len(done.stderr.splitlines()) == 1
        assert "NVML" in done.stderr or "driver" in done.stderr
    assert node.containers() == []
    assert node.metric("mgpu_agent_info", tracker="cuda") == 1


def test_insisting_on_the_drivers_own_limits_where_it_has_none():
    with a_node(enforce="native") as node:
        code, last = refused(node)
        assert code == 7
        assert "R615" in last


def test_a_container_that_insists_on_the_drivers_own_limits(node):
    node.start_agent()
    done = node.cli("run", *SHARE, "--enforcer", "native", "--", "true", check=False)
    assert done.returncode == 125
    assert "R615" in done.stderr
    assert node.containers() == []
    assert not check(node, "enforcer", "native")["available"]
    assert check(node, "enforcer", "kill")["in_use"]


# Ends


def test_stopping_leaves_the_limits_and_teardown_takes_everything(node):
    node.start_agent()
    tenant = Tenant(node, "a", *SHARE)
    other = Tenant(node, "b", *SHARE)
    assert tenant.ask("alloc", 100) == {"result": 0}
    assert node.stop_agent() == 0
    done = node.cli("status", check=False)
    assert done.returncode == 8
    assert len(done.stderr.splitlines()) == 1
    assert tenant.ask("alloc", 100) == {"result": 0}
    assert tenant.ask("alloc", 4000) == {"result": "killed"}
    node.start_agent()
    assert other.ask("alloc", 100) == {"result": 0}
    (used,) = node.used("b").values()
    assert used >= 100 * MIB
    assert node.stop_agent() == 0
    first = node.teardown()
    assert first.returncode == 0
    assert "gate on cgroup" in first.stdout and "node /dev/mgpu0" in first.stdout
    assert leftovers(node.bpf_root) == []
    second = node.teardown()
    assert (second.returncode, second.stdout) == (0, "")
    assert other.ask("info")["result"] == 0  # a workload that runs is not stopped by it
    other.end()
