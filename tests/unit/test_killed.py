"""The agent killed at each step of a change: nothing acknowledged is lost, nothing half is left."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator

import pytest

from mgpu.client import Client
from mgpu.errors import AgentUnreachable

AGENT = Path(__file__).with_name("dying_agent.py")
SHARE: Dict[str, object] = {"core": 30, "memory_mib": 4096}


@contextmanager
def agent(folder: Path, step: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, str(AGENT), str(folder), step]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def arm(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"arm\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"armed\n"


# Whether the ledger has the change once the agent was killed in the step.
@pytest.mark.parametrize(
    ("step", "kept"), [("resolve", False), ("commit", True), ("apply", True), ("answer", True)]
)
def test_bind(tmp_path: Path, step: str, kept: bool) -> None:
    client = Client(str(tmp_path / "agent.sock"))
    with agent(tmp_path, step) as process:
        arm(process)
        with pytest.raises(AgentUnreachable):
            client.bind({"target": "aaaa", **SHARE})
        assert process.wait(10) == -9
    with agent(tmp_path, "none"):
        rows = client.containers()["containers"]
        assert [row["container_id"] for row in rows] == ["aaaa00000000"] * kept
        if kept:
            client.release("aaaa")
        client.bind({"target": "aaaa", **SHARE})


@pytest.mark.parametrize("step", ["commit", "answer"])
def test_release_stays_released(tmp_path: Path, step: str) -> None:
    client = Client(str(tmp_path / "agent.sock"))
    with agent(tmp_path, step) as process:
        client.bind({"target": "aaaa", **SHARE})
        arm(process)
        if step == "commit":
            with pytest.raises(AgentUnreachable):
                client.release("aaaa")
        else:
            client.release("aaaa")
    with agent(tmp_path, "none"):
        assert client.containers()["containers"] == []


@pytest.mark.parametrize("step", ["commit", "answer"])
def test_set_is_whole(tmp_path: Path, step: str) -> None:
    client = Client(str(tmp_path / "agent.sock"))
    with agent(tmp_path, step) as process:
        client.bind({"target": "aaaa", **SHARE})
        arm(process)
        with pytest.raises(AgentUnreachable):
            client.set("aaaa", {"core": 50, "memory_mib": 8192})
    with agent(tmp_path, "none"):
        [row] = client.containers()["containers"]
        assert row["compute_weight_online"] == 50
        assert row["vmem_limit_bytes"] == 8589934592


@pytest.mark.parametrize("step", ["resolve", "commit", "apply", "answer"])
def test_run_that_never_began_is_no_load_for_long(tmp_path: Path, step: str) -> None:
    client = Client(str(tmp_path / "agent.sock"))
    with agent(tmp_path, step) as process:
        arm(process)
        with pytest.raises(AgentUnreachable):
            client.start_run({"pid": 4711, **SHARE})
        assert process.wait(10) == -9
    with agent(tmp_path, "none"):
        # Its empty cgroup has ended, so a request that needs the room gets it.
        client.bind({"target": "aaaa", "core": 99, "memory_mib": 4096, "device": 1})
