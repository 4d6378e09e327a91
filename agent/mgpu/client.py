"""The agent's API from Python: HTTP/1.1 with JSON over its unix socket.

Written on bare sockets, because http.client brings the mail and TLS packages along, which would
be half of the time that ``mgpu-cli container info`` may take.
"""

import json
import os
import socket
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from mgpu.errors import AgentUnreachable, NotPermitted, from_json

DEFAULT_SOCKET = "/run/mgpu/agent.sock"
# A change waits for the kernel to be made to agree, and for the changes before it.
TIMEOUT_S = 60.0
BACKLOG_RETRY_S = 0.02

Json = Dict[str, Any]


class Client:
    """One method for each verb. All raise the agent's own errors, or AgentUnreachable."""

    def __init__(self, socket_path: Optional[str] = None, timeout_s: float = TIMEOUT_S) -> None:
        self.socket_path = socket_path or os.environ.get("MGPU_SOCKET") or DEFAULT_SOCKET
        self._timeout_s = timeout_s

    def status(self) -> Json:
        return self.call("GET", "/v1/status")

    def devices(self) -> Json:
        return self.call("GET", "/v1/devices")

    def containers(self) -> Json:
        return self.call("GET", "/v1/containers")

    def container(self, container: str) -> Json:
        return self.call("GET", f"/v1/containers/{_quoted(container)}")

    def bind(self, request: Mapping[str, object]) -> Json:
        return self.call("POST", "/v1/containers", request)

    def start_run(self, request: Mapping[str, object]) -> Json:
        return self.call("POST", "/v1/runs", request)

    def set(self, container: str, changes: Mapping[str, object]) -> Json:
        return self.call("PATCH", f"/v1/containers/{_quoted(container)}", changes)

    def release(self, container: str, force: bool = False) -> Json:
        return self.call("DELETE", f"/v1/containers/{_quoted(container)}?force={int(force)}")

    def policy(self, device: str) -> Json:
        return self.call("GET", f"/v1/devices/{_quoted(device)}/policy")

    def set_policy(self, device: str, policy: str) -> Json:
        return self.call("PUT", f"/v1/devices/{_quoted(device)}/policy", {"policy": policy})

    def check(self) -> Json:
        return self.call("GET", "/v1/check")

    def top(self) -> Json:
        return self.call("GET", "/v1/top")

    def call(self, method: str, target: str, body: Optional[Mapping[str, object]] = None) -> Json:
        """The JSON of a good answer. Raises the error that a bad one carries."""
        payload = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: mgpu\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        try:
            status, answer = _parse(self._exchange(head.encode("ascii") + payload))
            failure = from_json(answer) if status >= 400 else None
        except (ValueError, LookupError, TypeError) as error:
            reason = f"the answer cannot be read ({error})"
            raise self._unreachable(reason, "see the agent's journal") from error
        if failure is not None:
            raise failure
        return answer

    def _exchange(self, request: bytes) -> bytes:
        journal = "see the agent's journal"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                self._connect(connection)
                _send(connection, request)
                return _receive(connection)
        except PermissionError as error:
            remedy = "run as root or as a member of the group mgpu"
            raise NotPermitted(self._asked(), "permission denied", remedy) from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            reason = f"no agent answers ({error.strerror})"
            raise self._unreachable(reason, "start it: systemctl start mgpu-agent") from error
        except socket.timeout as error:
            reason = f"no answer within {self._timeout_s:g} s"
            raise self._unreachable(reason, journal) from error
        except OSError as error:
            raise self._unreachable(error.strerror or str(error), journal) from error

    def _connect(self, connection: socket.socket) -> None:
        """A full backlog is waited for; with a timeout set the kernel itself would not wait."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return connection.connect(self.socket_path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(BACKLOG_RETRY_S)

    def _asked(self) -> str:
        return f"agent at {self.socket_path}"

    def _unreachable(self, reason: str, remedy: str) -> AgentUnreachable:
        return AgentUnreachable(self._asked(), reason, remedy)


def _send(connection: socket.socket, request: bytes) -> None:
    # An agent that refuses early may have answered and closed: then the answer says why.
    try:
        connection.sendall(request, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError):
        return


def _receive(connection: socket.socket) -> bytes:
    parts: List[bytes] = []
    while True:
        part = connection.recv(1 << 18)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _parse(raw: bytes) -> Tuple[int, Json]:
    head, gap, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    if not gap or len(body) != int(headers["content-length"]):
        raise ValueError("it ends in the middle")
    answer = json.loads(body.decode("utf-8"))
    if not isinstance(answer, dict):
        raise ValueError("not an object")
    return int(lines[0].split(" ")[1]), answer


def _quoted(text: str) -> str:
    # urllib.parse.quote without its import.
    safe = "-._~"
    return "".join(
        chr(b) if chr(b).isalnum() and b < 128 or chr(b) in safe else f"%{b:02X}"
        for b in text.encode("utf-8", "surrogateescape")
    )
