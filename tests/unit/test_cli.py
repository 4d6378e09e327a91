"""mgpu-cli as people and scripts use it: its output, its exit codes, and ``run``."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, List

import pytest
from front_doubles import Node, wait_for

from mgpu import cli, errors, tables_text
from mgpu.api import Api
from mgpu.httpd import HttpServer
from mgpu.model import MIB, PidUse
from mgpu.processes import Processes

DOCS = Path(__file__).parents[2] / "docs"
CLI = [sys.executable, "-m", "mgpu.cli"]
SHARE = ["--core", "30", "--memory", "4096"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path, processes=Processes())
    api = Api(made.service)
    path = str(tmp_path / "agent.sock")
    server = HttpServer([api.site(path, "root")])
    server.start()
    monkeypatch.setenv("MGPU_SOCKET", path)
    yield made
    server.stop()
    api.stop()


Text = pytest.CaptureFixture[str]


def command(*words: str, **more: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*CLI, *words],
        capture_output=True,
        encoding="latin-1",
        timeout=30,
        **more,  # type: ignore[call-overload]
    )


def test_device_info(node: Node, capsys: Text) -> None:
    assert cli.main(["device", "info"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["device", "info", "-a", "1"]) == 0
    one = capsys.readouterr().out
    assert short.count("| device_id ") == 2
    assert one.count("| device_id ") == 1
    assert "device_major" in one and "device_major" not in short
    assert cli.main(["device", "info", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["devices"]
    assert rows[1]["vmem_free_bytes"] == 23028 * MIB


def test_container_info(node: Node, capsys: Text) -> None:
    node.bind("7b0622290a6e")
    node.bind("aaaa")
    node.use("7b06", PidUse(1234, 512 * MIB))
    assert cli.main(["container", "info"]) == 0
    out = capsys.readouterr().out
    assert "| Free: 3584 MiB    |" in out
    assert "| PID 1234: 512 MiB |" in out
    assert cli.main(["container", "info", "7b06", "-o", "json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["containers"]
    assert row["vmem_info"]["pids"][0]["used_bytes"] == 512 * MIB


def test_bind_set_release(node: Node, capsys: Text) -> None:
    node.groups.make("/containers/aaaa")
    assert cli.main(["bind", "aaaa", *SHARE, "--offline", "--name", "web"]) == 0
    assert cli.main(["set", "web", "--core", "35", "--online", "--enforcer", "observe"]) == 0
    container = node.ledger.find("web")
    assert (container.online, container.instances[0].compute_weight) == (True, 35)
    assert cli.main(["release", "web", "--force"]) == 0
    assert capsys.readouterr().out.endswith("released aaaa00000000\n")
    assert node.ledger.containers() == []


def test_warnings_go_to_stderr(node: Node, capsys: Text) -> None:
    node.groups.make("/containers/aaaa")
    assert cli.main(["bind", "aaaa", "--core", "7", "--memory", "4096", "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("mgpu-cli: warning: core 7")
    assert captured.err.count("\n") == 1
    json.loads(captured.out)


def test_policy(node: Node, capsys: Text) -> None:
    assert cli.main(["policy", "1", "native-burst-share"]) == 0
    assert cli.main(["policy", "1"]) == 0
    assert capsys.readouterr().out == "device 1: 2 native-burst-share\n" * 2


def test_check_status_top(node: Node, capsys: Text) -> None:
    for words in (["check"], ["status"], ["top", "-1"], ["top"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.strip()
        assert cli.main([*words, "-o", "json"]) == 0
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ([], 2, "required"),
        (["fly"], 2, "fly"),
        (["device"], 2, "required"),
        (["device", "info", "--colour"], 2, "--colour"),
        (["device", "info", "-o", "yaml"], 2, "yaml"),
        (["device", "info", "7"], 4, "7"),
        (["container", "info", "7"], 4, "7"),
        (["bind", "aaaa"], 2, "--core"),
        (["bind", "aaaa", "--cor", "30", "--mem", "4096"], 2, "--core"),
        (["run", *SHARE, "true"], 125, "true"),
        (["bind", "aaaa", "--core", "30"], 3, "memory"),
        (["bind", "aaaa", "--core", "0", "--memory", "4096"], 2, "core"),
        (["bind", "aaaa", "--core", "-5", "--memory", "4096"], 2, "core"),
        (["bind", "aaaa", "--core", "1e3", "--memory", "4096"], 2, "core"),
        (["bind", "aaaa", "--core", "30", "--memory", "4GiB"], 2, "memory"),
        (["bind", "aaaa", "--core", "30", "--memory", "99999999999999999999"], 2, "memory"),
        (["bind", "aaaa", "--core", "30", "--memory", "900000"], 6, "memory 900000"),
        (["bind", "aaaa", "--core", "30", "--memory", "4096", "--cards", "2"], 3, "cards 2"),
        (["bind", "aaaa", "--core", "30", "--memory", "4096", "--device", "x"], 4, "x"),
        (["bind", "aaaa", *SHARE, "--enforcer", "beg"], 2, "beg"),
        (["bind", "nobody", *SHARE], 4, "nobody"),
        (["bind", "", *SHARE], 2, "target"),
        (["bind", "a\nb", *SHARE], 2, "target"),
        (["set", "nobody", "--core", "5"], 4, "nobody"),
        (["set", "nobody"], 2, "nothing to change"),
        (["release", "nobody"], 4, "nobody"),
        (["policy", "0", "fair"], 2, "fair"),
        (["top", "-d", "0"], 2, "0.1"),
        (["top", "-d", "nan"], 2, "0.1"),
        (["run", *SHARE], 125, "after --"),
        (["run", "--", "true"], 125, "--core"),
        (["run", "--core", "0", "--memory", "4096", "--", "true"], 125, "core"),
        (["--socket", "/nowhere/agent.sock", "status"], 8, "/nowhere/agent.sock"),
        (["--socket", "/nowhere/agent.sock", "run", *SHARE, "--", "true"], 125, "/nowhere"),
    ],
)
def test_mistakes_get_one_line_and_a_code(
    node: Node, capsys: Text, words: List[str], code: int, named: str
) -> None:
    node.groups.make("/containers/aaaa")
    assert cli.main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r"mgpu-cli: [^\n]+\n\Z", captured.err), captured.err
    assert named in captured.err
    assert node.ledger.containers() == []


def test_letters_that_the_terminal_lacks(node: Node) -> None:
    node.bind("aaaa", name="caf\u00e9\u4e2d")
    done = command("top", env={**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u4e2d" in done.stdout


def test_output_that_cannot_be_written(node: Node) -> None:
    done = command("container", "info", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        process = subprocess.run([*CLI, "check"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert process.returncode == 1
    assert re.match(rb"mgpu-cli: output: No space left on device; [^\n]+\n\Z", process.stderr)


def test_closed_pipe_is_quiet(node: Node) -> None:
    for number in range(16):
        node.bind(f"{number:04}", core=5, memory_mib=1024, device=0)
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [*CLI, "container", "info"], stdout=writer, stderr=subprocess.PIPE, restore_signals=False
    )
    os.close(writer)
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 141


# run


def test_run_gives_back_the_status(node: Node) -> None:
    seen: List[int] = []
    node.during_apply = lambda container_id: seen.append(len(node.ledger.containers()))
    done = command("run", *SHARE, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert (seen, node.ledger.containers(), node.groups.alive) == ([1, 0], [], {})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["sh", "-c", "kill -KILL $$"], 137),
        (["/no/such/command"], 127),
        (["no-such-command"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
    ],
)
def test_run_codes(node: Node, words: List[str], code: int) -> None:
    assert command("run", *SHARE, "--", *words).returncode == code
    assert (node.ledger.containers(), node.groups.alive) == ([], {})


def test_run_does_not_start_what_is_refused(node: Node, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    done = command("run", "--core", "30", "--memory", "900000", "--", "touch", str(mark))
    assert done.returncode == 125
    assert "no card has room" in done.stderr
    assert not mark.exists()
    assert node.groups.alive == {}


def test_run_starts_inside_its_cgroup(node: Node) -> None:
    process = subprocess.Popen([*CLI, "run", *SHARE, "--", "sleep", "60"])
    pid = _running(node)
    wait_for(lambda: _comm(pid) == "sleep")
    process.terminate()
    assert process.wait(10) == 143


def test_run_keeps_the_commands_own_options(node: Node) -> None:
    done = command("run", *SHARE, "--", "printf", "%s.", "--core", "-o", "--", "x")
    assert done.stdout == "--core.-o.--.x."


# 32 and 33 are glibc's own (nptl(7)): no program sets them, and how they stand is not ours to say.
C_LIBRARY_SIGNALS = 1 << 31 | 1 << 32


def test_run_restores_what_python_ignores(node: Node) -> None:
    done = command("run", *SHARE, "--", "grep", "-E", "SigIgn|SigBlk", "/proc/self/status")
    ignored, blocked = (
        int(re.findall(rf"{name}:\s*(\w+)", done.stdout)[0], 16) for name in ("SigIgn", "SigBlk")
    )
    assert ignored & ~C_LIBRARY_SIGNALS == 0
    assert blocked & ~C_LIBRARY_SIGNALS == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_run_hands_signals_on(node: Node, number: signal.Signals) -> None:
    script = f"trap 'exit 9' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [*CLI, "run", *SHARE, "--", "sh", "-c", script], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(10) == 9
    process.stdout.close()
    assert node.ledger.containers() == []


def test_run_stops_and_goes_on_with_its_command(node: Node) -> None:
    process = subprocess.Popen([*CLI, "run", *SHARE, "--", "sleep", "60"])
    pid = _running(node)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _state(process.pid) == "T")
    os.kill(process.pid, signal.SIGCONT)
    wait_for(lambda: _state(pid) == "S")
    process.terminate()
    assert process.wait(10) == 143


def test_run_killed_leaves_its_command_running_within_its_limits(node: Node) -> None:
    process = subprocess.Popen([*CLI, "run", *SHARE, "--", "sleep", "60"])
    pid = _running(node)
    wait_for(lambda: _comm(pid) == "sleep")
    process.kill()
    process.wait(10)
    assert _comm(pid) == "sleep"
    assert len(node.ledger.containers()) == 1
    os.kill(pid, signal.SIGKILL)


def test_run_killed_before_its_command_starts(node: Node, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    process = subprocess.Popen([*CLI, "run", *SHARE, "--", "touch", str(mark)])
    node.during_apply = lambda container_id: process.kill()
    process.wait(10)
    wait_for(lambda: not any(node.groups.members(c) for c in node.groups.alive.values()))
    assert not mark.exists()


def test_job_control_on_a_terminal(node: Node) -> None:
    shell, master = pty.fork()
    if shell == 0:
        os.environ["PS1"] = "prompt "
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        _expect(master, b"prompt ")
        line = " ".join([*CLI, "run", *SHARE, "--", "sleep", "60"])
        os.write(master, line.encode() + b"\n")
        pid = _running(node)
        wait_for(lambda: _comm(pid) == "sleep")
        os.write(master, b"\x1a")
        _expect(master, b"Stopped")
        assert _state(pid) == "T"
        os.write(master, b"fg\n")
        wait_for(lambda: _state(pid) == "S")
        os.write(master, b"\x03")
        _expect(master, b"prompt ")
        os.write(master, b"echo code=$?\n")
        _expect(master, b"code=130")
    finally:
        os.close(master)  # the terminal hangs up on whoever is left
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
    wait_for(lambda: not node.ledger.containers())


def _running(node: Node) -> int:
    """The PID that was moved into the one cgroup of a run, once it was."""
    wait_for(lambda: any(node.groups.members(c) for c in list(node.groups.alive.values())))
    [cgroup] = node.groups.alive.values()
    return node.groups.members(cgroup)[0]


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def _comm(pid: int) -> str:
    with open(f"/proc/{pid}/comm", encoding="ascii") as comm:
        return comm.read().strip()


def _expect(master: int, words: bytes) -> None:
    received, deadline = b"", time.monotonic() + 15
    while words not in received:
        assert time.monotonic() < deadline, received
        if select.select([master], [], [], 0.1)[0]:
            received += os.read(master, 4096)


def test_top_redraws_on_a_terminal(node: Node) -> None:
    child, master = pty.fork()
    if child == 0:
        os.execv(sys.executable, [*CLI, "top", "-d", "0.1"])
    try:
        for _ in range(3):
            _expect(master, b"\x1b[H\x1b[2Jmgpu-agent 0.1.0")
        os.write(master, b"\x03")
        _, status = os.waitpid(child, 0)
    finally:
        os.close(master)
    assert (os.WIFEXITED(status), os.WEXITSTATUS(status)) == (True, 0)


# The page


def test_page_names_every_command_option_field_and_code() -> None:
    page = (DOCS / "cli.md").read_text()
    for name in cli.names_of_commands():
        assert f"`mgpu-cli {name}" in page, name
    for title, _ in (*tables_text.DEVICE_FIELDS, *tables_text.CONTAINER_FIELDS):
        starred = " *" if title in tables_text.DEVICE_SHORT else ""
        assert f"| `{title}`{starred} |" in page, title
    for error in (errors.MgpuError, *errors.BY_CODE.values()):
        assert f"| {error.exit_code} | `{error.code}` |" in page


def test_page_names_every_option() -> None:
    page = (DOCS / "cli.md").read_text()
    help_text = "".join(
        command(*words, "--help").stdout for words in (["run"], ["bind"], ["set"], ["release"])
    )
    for option in set(re.findall(r"(--[a-z]+)", help_text)) - {"--help", "--output"}:
        assert f"`{option}" in page, option


def test_listings_load_little() -> None:
    code = "import sys, mgpu.cli; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    loaded = set(done.stdout.decode().split())
    heavy = {"pyroute2", "pynvml", "sqlite3", "prometheus_client", "http.client", "asyncio"}
    assert loaded & heavy == set()
