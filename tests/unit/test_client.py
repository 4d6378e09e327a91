"""The client against a real server, and against agents that are absent, rude or broken."""

import os
import socket
import threading
from pathlib import Path
from typing import Iterator

import pytest
from front_doubles import Node

from mgpu.api import Api
from mgpu.client import DEFAULT_SOCKET, Client
from mgpu.errors import AgentUnreachable, Conflict, NotFound, NotPermitted
from mgpu.httpd import HttpServer


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    api = Api(made.service)
    server = HttpServer([api.site(str(tmp_path / "agent.sock"), "root")])
    server.start()
    yield made
    server.stop()
    api.stop()


@pytest.fixture
def client(node: Node, tmp_path: Path) -> Client:
    return Client(str(tmp_path / "agent.sock"))


def test_every_verb(node: Node, client: Client) -> None:
    node.groups.make("/containers/aaaa")
    bound = client.bind({"target": "aaaa", "core": 30, "memory_mib": 4096})
    assert client.container("aaaa")["containers"][0]["id"] == bound["id"]
    assert client.set("aaaa", {"core": 35})["containers"][0]["compute_weight_online"] == 35
    assert client.set_policy("1", "2")["compute_policy"] == 2
    assert client.policy("1")["compute_policy"] == 2
    assert len(client.devices()["devices"]) == 2
    assert client.check()["checks"][0]["available"] is False
    assert client.top()["status"] == client.status()
    assert client.release("aaaa", force=True)["released"] == bound["id"]
    assert client.containers()["containers"] == []
    run = client.start_run({"pid": 4711, "core": 5, "memory_mib": 1024})
    assert len(run["id"]) == 64


def test_the_agents_errors_are_raised_as_they_are(node: Node, client: Client) -> None:
    node.bind("aaaa")
    with pytest.raises(Conflict) as raised:
        client.bind({"target": "aaaa", "core": 30, "memory_mib": 4096})
    assert raised.value.asked == "container aaaa00000000"


@pytest.mark.parametrize("name", ["no/such", "a b?c#d", "\u00e9\u4e2d", "..", "%2F", "x\ny"])
def test_names_travel_unharmed(client: Client, name: str) -> None:
    with pytest.raises(NotFound, match="no container of that id") as raised:
        client.container(name)
    assert raised.value.asked == f"container {ascii(name)}"


def test_large_answers(node: Node, client: Client) -> None:
    for number in range(10):
        node.bind(f"{number:04}", core=5, memory_mib=1024, device=0, name="n" * 4000)
    rows = client.containers()["containers"]
    assert [len(row["name"]) for row in rows] == [4000] * 10


def test_socket_is_named_or_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MGPU_SOCKET", raising=False)
    assert Client().socket_path == DEFAULT_SOCKET
    monkeypatch.setenv("MGPU_SOCKET", "/elsewhere")
    assert Client().socket_path == "/elsewhere"
    assert Client("/given").socket_path == "/given"


def test_no_agent(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with pytest.raises(AgentUnreachable, match="systemctl start mgpu-agent"):
        Client(str(path)).status()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with pytest.raises(AgentUnreachable, match="refused"):
        Client(str(path)).status()


def test_path_that_no_address_holds(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable):
        Client(str(tmp_path / ("x" * 200))).status()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_user_outside_the_group(node: Node, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            Client(str(tmp_path / "agent.sock")).status()
        except NotPermitted as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"member of the group mgpu" in os.read(reader, 1000)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 500 Oops\r\nContent-Length: 11\r\n\r\n{"error":1}',
        b"HTTP/1.1 OK\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
def test_answers_that_are_none(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(AgentUnreachable, match="journal"):
            Client(path).status()
        thread.join()


def test_agent_that_hangs(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(AgentUnreachable, match="no answer within 0.1 s"):
            Client(path, timeout_s=0.1).status()
