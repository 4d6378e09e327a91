"""The API on a real unix socket, fed with what clients send by mistake, by bug and on purpose."""

import gc
import json
import os
import random
import re
import resource
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
from front_doubles import Node, wait_for

from mgpu import api as api_module
from mgpu.api import ROUTES, Api
from mgpu.errors import AlreadyRunning, ConfigInvalid
from mgpu.http_message import BODY_LIMIT_BYTES, HEAD_LIMIT_BYTES
from mgpu.httpd import HttpServer, Limits
from mgpu.listen import unix_socket

DOCS = Path(__file__).parents[2] / "docs"
# Short, so that the tests of slow clients are quick.
LIMITS = Limits(
    head_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1.0, write_timeout_s=0.3, connections=300
)


class Rig:
    """A server on its own socket and a raw client for it."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        self.path = str(folder / "agent.sock")
        self.api = Api(self.node.service)
        self.server = HttpServer([self.api.site(self.path, "root")], LIMITS)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self.api.stop()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10)
        connection.connect(self.path)
        return connection

    def raw(self, data: bytes, end: bool = False) -> Tuple[int, Dict[str, Any]]:
        """What comes back for ``data``; ``end`` closes our side after it."""
        with self.connect() as connection:
            try:
                connection.sendall(data)
                if end:
                    connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass
            return answer_of(connection)

    def ask(self, method: str, path: str, body: object = None) -> Tuple[int, Dict[str, Any]]:
        data = b"" if body is None else json.dumps(body).encode()
        return self.raw(request(method, path, data))


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def answer_of(connection: socket.socket) -> Tuple[int, Dict[str, Any]]:
    """One answer, read by its Content-Length."""
    stream = connection.makefile("rb")
    first = stream.readline()
    assert first.startswith(b"HTTP/1.1 "), first
    headers = {}
    for line in iter(stream.readline, b"\r\n"):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    assert headers["content-type"] == "application/json"
    body = stream.read(int(headers["content-length"]))
    return int(first.split()[1]), json.loads(body)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.stop()


def refused(answer: Tuple[int, Dict[str, Any]], status: int) -> Dict[str, Any]:
    """The error object of an answer with this status, all of it one line."""
    assert answer[0] == status, answer
    error: Dict[str, Any] = answer[1]["error"]
    assert set(error) == {"code", "exit_code", "asked", "reason", "remedy", "message"}
    assert "\n" not in error["message"]
    return error


def test_every_verb(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    status, answer = rig.ask(
        "POST", "/v1/containers", {"target": "aaaa", "core": 30, "memory_mib": 4096}
    )
    assert (status, answer["warnings"]) == (201, [])
    container_id = answer["id"]
    assert rig.ask("GET", "/v1/containers")[1]["containers"][0]["id"] == container_id
    assert rig.ask("GET", "/v1/containers/aaaa")[1]["containers"][0]["id"] == container_id
    status, answer = rig.ask("PATCH", "/v1/containers/aaaa", {"core": "40"})
    assert answer["containers"][0]["compute_weight_online"] == 40
    assert rig.ask("PUT", "/v1/devices/1/policy", {"policy": 1})[1]["compute_policy"] == 1
    assert rig.ask("GET", "/v1/devices/1/policy")[1]["compute_policy_name"] == (
        "guaranteed-burst-share"
    )
    assert [row["device_id"] for row in rig.ask("GET", "/v1/devices")[1]["devices"]] == [0, 1]
    assert rig.ask("GET", "/v1/status")[1]["containers"] == 1
    assert rig.ask("GET", "/v1/check")[1]["checks"][0]["name"] == "rm"
    assert set(rig.ask("GET", "/v1/top")[1]) == {"status", "devices", "containers"}
    status, answer = rig.ask("DELETE", "/v1/containers/aaaa?force=1")
    assert (status, answer["released"]) == (200, container_id)
    status, answer = rig.ask("POST", "/v1/runs", {"pid": 4711, "core": 5, "memory_mib": 1024})
    assert (status, len(answer["id"])) == (201, 64)


def test_curl_can_use_it(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    body = '{"target": "aaaa", "core": 30, "memory_mib": 4096}'
    command = ["curl", "-sS", "--unix-socket", rig.path, "http://mgpu/v1/containers"]
    posted = subprocess.run([*command, "-d", body], stdout=subprocess.PIPE, check=True)
    assert json.loads(posted.stdout)["containers"][0]["container_id"] == "aaaa00000000"
    listed = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert json.loads(listed.stdout)["containers"][0]["device_id"] == 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "request body"),
        (b"[]", "request body"),
        (b"null", "request body"),
        (b'"text"', "request body"),
        (b"{", "request body"),
        (b"{'core': 30}", "request body"),
        (b'\xff\xfe{"core": 30}', "request body"),
        (b'{"core": NaN}', "request body"),
        (b"[" * 20_000, "request body"),
        (b'{"a":' * 12_000, "request body"),
        (b'{"core": 1, "core": 2}', "core"),
        (b'{"target": "aaaa", "core": 30, "colour": 1}', "colour"),
        (b'{"target": "aaaa", "core": 30, "core\\nx": 1}', "core"),
        (b'{"core": 30}', "target"),
        (b'{"target": "aaaa"}', "core"),
        (b'{"target": null, "core": 30}', "target"),
        (b'{"target": 5, "core": 30}', "target"),
        (b'{"target": "", "core": 30}', "target"),
        (b'{"target": "a\\u0000b", "core": 30}', "target"),
        (b'{"target": "aaaa", "core": [30]}', "core"),
        (b'{"target": "aaaa", "core": {}}', "core"),
        (b'{"target": "aaaa", "core": true}', "core"),
        (b'{"target": "aaaa", "core": 30.5}', "core"),
        (b'{"target": "aaaa", "core": 3e400}', "core"),
        (b'{"target": "aaaa", "core": ' + b"9" * 5000 + b"}", ""),
        (b'{"target": "aaaa", "core": 30, "memory_mib": "4 GiB"}', "memory"),
        (b'{"target": "aaaa", "core": 30, "memory_mib": -1}', "memory"),
        (b'{"target": "aaaa", "core": 30, "online": 1}', "online"),
        (b'{"target": "aaaa", "core": 30, "enforcer": "beg"}', "enforcer"),
        (b'{"target": "aaaa", "core": 30, "enforcer": ["kill"]}', "enforcer"),
        (b'{"target": "aaaa", "core": 30, "containers_in_pod": 0}', "containers_in_pod"),
    ],
)
def test_bad_bodies_name_what_is_wrong(rig: Rig, body: bytes, named: str) -> None:
    rig.node.groups.make("/containers/aaaa")
    error = refused(rig.raw(request("POST", "/v1/containers", body)), 400)
    assert named in error["asked"]
    assert (error["code"], error["exit_code"]) == ("bad-input", 2)
    assert len(error["message"]) < 400
    assert rig.node.ledger.containers() == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /v1/status\r\n\r\n", 400),
        (b"GET  /v1/status HTTP/1.1\r\n\r\n", 400),
        (b"G(T /v1/status HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/status HTTP/2.0\r\n\r\n", 505),
        (b"GET /v1/status HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: ten\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        (b"POST /v1/runs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET /v1/%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/devices?all=1&all=2 HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/devices?nonsense=1 HTTP/1.1\r\n\r\n", 400),
        (b"GET http://[bad/v1 HTTP/1.1\r\n\r\n", 400),
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/status/ HTTP/1.1\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"DELETE /v1/status HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /v1/status HTTP/1.1\r\n\r\n", 405),
        (b"BREW /v1/containers HTTP/1.1\r\n\r\n", 405),
        (b"GET /v1/status HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"DELETE /v1/containers/x?force=yes HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/status HTTP/1.1\r\nX: " + b"x" * HEAD_LIMIT_BYTES + b"\r\n\r\n", 431),
        (b"GET /v1/status HTTP/1.1\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
        (b"GET /" + b"x" * 2 * HEAD_LIMIT_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"\r\n" * HEAD_LIMIT_BYTES, 431),
        (b"POST /v1/runs HTTP/1.1\r\nContent-Length: 65537\r\n\r\n" + b"x" * 65537, 413),
        (b"POST /v1/runs HTTP/1.1\r\nContent-Length: 999999999999999999999\r\n\r\n", 400),
    ],
)
def test_bad_requests(rig: Rig, data: bytes, status: int) -> None:
    refused(rig.raw(data), status)
    assert rig.ask("GET", "/v1/status")[0] == 200


def test_method_not_allowed_says_which_are(rig: Rig) -> None:
    error = refused(rig.ask("PUT", "/v1/containers"), 405)
    assert error["remedy"] == "use GET or POST"


def test_the_largest_body_is_read(rig: Rig) -> None:
    body = b'{"target": "aaaa", "core": 100}'.ljust(BODY_LIMIT_BYTES)
    refused(rig.raw(request("POST", "/v1/containers", body)), 404)


def test_a_client_that_drips_is_told_and_dropped(rig: Rig) -> None:
    with rig.connect() as connection:
        connection.sendall(b"GET /v1/status HT")
        refused(answer_of(connection), 408)
        assert connection.recv(1) == b""


def test_a_body_that_never_comes(rig: Rig) -> None:
    with rig.connect() as connection:
        connection.sendall(b"POST /v1/runs HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
        refused(answer_of(connection), 408)


def test_a_body_cut_short(rig: Rig) -> None:
    data = b"POST /v1/runs HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"
    error = refused(rig.raw(data, end=True), 400)
    assert "1 of the 10 bytes" in error["reason"]


def test_a_head_cut_short(rig: Rig) -> None:
    refused(rig.raw(b"GET /v1/status HTTP/1.1\r\nHo", end=True), 400)


def test_a_silent_client_is_dropped(rig: Rig) -> None:
    with rig.connect() as connection:
        assert connection.recv(1) == b""


def test_half_closed_client_gets_its_answer(rig: Rig) -> None:
    assert rig.raw(request("GET", "/v1/status"), end=True)[0] == 200


def test_keep_alive_and_pipelining(rig: Rig) -> None:
    with rig.connect() as connection:
        for _ in range(3):
            connection.sendall(request("GET", "/v1/status"))
            assert answer_of(connection)[0] == 200
        connection.sendall(request("GET", "/v1/status") * 2 + request("GET", "/nothing"))
        received = b""
        while received.count(b"HTTP/1.1 ") < 3:
            received += connection.recv(65536)
        assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"200", b"404"]


def test_connection_close_is_honoured(rig: Rig) -> None:
    for data in (
        request("GET", "/v1/status", b"", "Connection: close"),
        b"GET /v1/status HTTP/1.0\r\n\r\n",
    ):
        with rig.connect() as connection:
            connection.sendall(data)
            assert answer_of(connection)[0] == 200
            assert connection.recv(1) == b""


def test_expect_continue(rig: Rig) -> None:
    with rig.connect() as connection:
        head = request("POST", "/v1/containers", b"", "Expect: 100-continue")
        connection.sendall(head.replace(b"Length: 0", b"Length: 2"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        refused(answer_of(connection), 400)


def test_two_hundred_clients_at_once(rig: Rig) -> None:
    clients = [rig.connect() for _ in range(200)]
    before = threading.active_count()
    for client in clients:
        client.sendall(request("GET", "/v1/containers"))
    assert [answer_of(client)[0] for client in clients] == [200] * 200
    # The lanes may have started their few threads; nobody gets one of his own.
    assert threading.active_count() <= before + api_module.READ_THREADS + 1
    for client in clients:
        client.close()


def test_slow_clients_hold_up_nobody(rig: Rig) -> None:
    slow = [rig.connect() for _ in range(200)]
    for client in slow:
        client.sendall(b"GET /v1/st")
    assert rig.ask("GET", "/v1/status")[0] == 200
    for client in slow:
        refused(answer_of(client), 408)
        client.close()


def test_more_clients_than_are_served_are_told(rig: Rig) -> None:
    crowd = [rig.connect() for _ in range(LIMITS.connections)]
    try:
        wait_for(lambda: len(rig.server._open) == LIMITS.connections)
        with rig.connect() as late:
            error = refused(answer_of(late), 503)
            assert error["remedy"] == "try again"
    finally:
        for client in crowd:
            client.close()
    wait_for(lambda: not rig.server._open)
    assert rig.ask("GET", "/v1/status")[0] == 200


def test_a_client_that_never_reads_is_dropped(rig: Rig) -> None:
    for number in range(16):
        rig.node.bind(f"{number:04}", core=5, memory_mib=1024, device=0, name="n" * 4000)
    with rig.connect() as connection:
        connection.settimeout(0.5)
        # Answers of 80 KB each; the kernel holds some 200 KB for a reader that does not come.
        connection.sendall(request("GET", "/v1/containers") * 100)
        wait_for(lambda: not rig.server._open)
    assert rig.ask("GET", "/v1/status")[0] == 200


def test_no_descriptor_is_left_behind(rig: Rig) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert rig.ask("GET", "/v1/status")[0] == 200
    wait_for(lambda: not rig.server._open)
    before = descriptors()
    for number in range(300):
        data = (b"", b"GET", b"nonsense\r\n\r\n", request("GET", "/v1/status"))[number % 4]
        with rig.connect() as connection:
            connection.sendall(data)
    wait_for(lambda: descriptors() <= before)


def test_more_clients_than_descriptors_wait_their_turn(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [rig.connect() for _ in range(60)]
    wait_for(lambda: len(rig.server._open) == 60)
    clients += [socket.socket(socket.AF_UNIX) for _ in range(100)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
    try:
        for client in clients[60:]:
            client.settimeout(20)
            client.connect(rig.path)
        for client in clients:
            client.sendall(request("GET", "/v1/status", b"", "Connection: close"))
        answers = [answer_of(client)[0] for client in clients[:60]]
        for client in clients[:60]:
            client.close()
        answers += [answer_of(client)[0] for client in clients[60:]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert answers == [200] * 160
    complaints = [r for r in caplog.records if r.getMessage() == "http-server"]
    assert 1 <= len(complaints) < 20
    for client in clients[60:]:
        client.close()


def test_mutilated_requests_never_hurt(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    body = b'{"target": "aaaa", "core": "x", "memory_mib": 4096, "online": true}'
    good = request("POST", "/v1/containers?a=b", body, "Expect: nothing", "Accept: */*")
    dice = random.Random(19735)
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            place = dice.randrange(len(bad))
            kind = dice.randrange(4)
            if kind == 0:
                bad[place] = dice.randrange(256)
            elif kind == 1:
                del bad[place : place + dice.randint(1, 20)]
            elif kind == 2:
                bad[place:place] = bytes(dice.choices(b'\r\n\0\xff{}[]:"9%', k=dice.randint(1, 9)))
            else:
                bad[place:place] = bad[: dice.randrange(len(bad))]
        with rig.connect() as connection:
            connection.sendall(bytes(bad))
            connection.shutdown(socket.SHUT_WR)
            status, answer = answer_of(connection)
            assert 400 <= status < 500 or status in (501, 505), bytes(bad)
            assert "\n" not in answer["error"]["message"]
    assert rig.node.ledger.containers() == []
    assert rig.ask("GET", "/v1/status")[0] == 200


def test_many_clients_change_at_once(rig: Rig) -> None:
    for number in range(30):
        rig.node.groups.make(f"/containers/{number:04}")
    answers: List[int] = []

    def bind_and_release(number: int) -> None:
        share = {"target": f"{number:04}", "core": 20, "memory_mib": 1024, "device": 1}
        for _ in range(3):
            status, _answer = rig.ask("POST", "/v1/containers", share)
            answers.append(status)
            if status == 201:
                assert rig.ask("DELETE", f"/v1/containers/{number:04}")[0] == 200

    threads = [threading.Thread(target=bind_and_release, args=(n,)) for n in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {201, 409}
    assert len(answers) == 90
    assert rig.node.ledger.containers() == []


def test_reading_goes_on_while_a_change_waits(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    may_go_on = threading.Event()
    begun = threading.Event()

    def during_apply(container_id: str) -> None:
        begun.set()
        assert may_go_on.wait(10)

    rig.node.during_apply = during_apply
    with rig.connect() as connection:
        body = b'{"target": "aaaa", "core": 30, "memory_mib": 4096}'
        connection.sendall(request("POST", "/v1/containers", body))
        assert begun.wait(10)
        assert rig.ask("GET", "/v1/containers")[0] == 200
        may_go_on.set()
        assert answer_of(connection)[0] == 201


def test_a_client_that_leaves_does_not_undo_its_change(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    with rig.connect() as connection:
        body = b'{"target": "aaaa", "core": 30, "memory_mib": 4096}'
        connection.sendall(request("POST", "/v1/containers", body))
    wait_for(lambda: len(rig.node.applied) == 1)
    assert len(rig.node.ledger.containers()) == 1


def test_unforeseen_errors_are_answers_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.node.service, "status", lambda: 1 / 0)
    error = refused(rig.ask("GET", "/v1/status"), 500)
    assert (error["code"], error["exit_code"]) == ("error", 1)
    assert "ZeroDivisionError" in error["reason"]


def test_changes_are_logged_with_their_peer(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="mgpu")
    rig.ask("DELETE", "/v1/containers/abcdef")
    [record] = [r for r in caplog.records if r.getMessage() == "api-release"]
    fields: Dict[str, object] = record.__dict__["fields"]
    assert fields["result"] == "not-found"
    assert (fields["peer_pid"], fields["peer_uid"]) == (os.getpid(), os.getuid())


def test_stop_lets_a_change_end(rig: Rig) -> None:
    rig.node.groups.make("/containers/aaaa")
    begun = threading.Event()

    def during_apply(container_id: str) -> None:
        begun.set()
        time.sleep(0.3)

    rig.node.during_apply = during_apply
    with rig.connect() as connection:
        body = b'{"target": "aaaa", "core": 30, "memory_mib": 4096}'
        connection.sendall(request("POST", "/v1/containers", body))
        assert begun.wait(10)
        rig.server.stop()
        assert answer_of(connection)[0] == 201


# The socket


def test_socket_is_for_root_and_the_group(tmp_path: Path) -> None:
    path = tmp_path / "new" / "agent.sock"
    with unix_socket(str(path), "root"):
        mode = path.lstat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
        assert [entry.name for entry in path.parent.iterdir()] == ["agent.sock"]


def test_group_that_is_missing_leaves_it_to_root(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "agent.sock"
    with unix_socket(str(path), "no-such-group"):
        assert path.stat().st_gid == os.getgid()
    assert "no-such-group" in caplog.text


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    unix_socket(str(path), "root").close()
    assert path.exists()
    with unix_socket(str(path), "root"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_socket_goes_with_its_agent_and_not_with_anothers(rig: Rig) -> None:
    rig.server.stop()
    with unix_socket(rig.path, "root"):
        rig.api.stop()
        assert os.path.exists(rig.path)
    os.unlink(rig.path)
    other = Api(rig.node.service)
    other.site(rig.path, "root").listener.close()
    other.stop()
    assert not os.path.exists(rig.path)


def test_what_a_killed_agent_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".mgpu-socket-abc"
    left.mkdir()
    (left / "s").write_text("")
    with unix_socket(str(tmp_path / "agent.sock"), "root"):
        assert [entry.name for entry in tmp_path.iterdir()] == ["agent.sock"]


def test_live_socket_is_left_alone(rig: Rig) -> None:
    with pytest.raises(AlreadyRunning):
        unix_socket(rig.path, "root")
    assert rig.ask("GET", "/v1/status")[0] == 200


def _regular_file(path: Path) -> None:
    path.write_text("precious")


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("occupy", [_regular_file, _folder, _dangling_link])
def test_path_that_is_taken(tmp_path: Path, occupy: Callable[[Path], None]) -> None:
    path = tmp_path / "agent.sock"
    occupy(path)
    before = path.lstat().st_ino
    with pytest.raises(ConfigInvalid, match="not a socket"):
        unix_socket(str(path), "root")
    assert path.lstat().st_ino == before


def test_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="agent.conf"):
        unix_socket(str(tmp_path / "file" / "agent.sock"), "root")


def test_path_that_no_address_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="107 bytes"):
        unix_socket(str(tmp_path / ("x" * 200)), "root")


# The page


def test_page_lists_every_route_and_field() -> None:
    page = (DOCS / "api.md").read_text()
    for route in ROUTES:
        assert f"`{route.method} {route.path}`" in page
        for field in route.fields or ():
            assert f"`{field}`" in page, (route, field)
    listed: List[str] = [line for line in page.splitlines() if line.startswith("| `")]
    routes = [line for line in listed if " /v1/" in line.split("|")[1]]
    assert len(routes) == len(ROUTES)
