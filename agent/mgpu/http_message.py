"""HTTP/1.1 messages: what a head may be, and what an answer is made of. Pure."""

import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Dict, Mapping, Optional, Sequence, Tuple
from urllib.parse import parse_qsl, unquote, urlsplit

from mgpu.errors import BadInput, MgpuError
from mgpu.ports import Peer

HEAD_LIMIT_BYTES = 16 * 1024
HEADERS_LIMIT = 64
BODY_LIMIT_BYTES = 64 * 1024
JSON_TYPE = "application/json"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


class HttpRefusal(BadInput):
    """A request that HTTP itself forbids; ``http_status`` says how."""

    def __init__(self, status: int, asked: str, reason: str, remedy: str) -> None:
        super().__init__(asked, reason, remedy)
        self.http_status = status
        self.headers: Dict[str, str] = {}


@dataclass(frozen=True)
class HttpRequest:
    """One complete request. ``path`` is as it was sent (quoted); ``peer`` is None over TCP."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    peer: Optional[Peer] = None


@dataclass(frozen=True)
class HttpAnswer:
    """What goes back. ``headers`` come on top of those the server sets."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(value: object, status: int = 200) -> HttpAnswer:
    """``value`` as JSON with a newline at its end, so that a terminal shows it well."""
    return HttpAnswer(status, (json.dumps(value) + "\n").encode())


def error_answer(error: MgpuError) -> HttpAnswer:
    """The answer that carries ``error``."""
    headers = error.headers if isinstance(error, HttpRefusal) else {}
    body = (json.dumps(error.as_json()) + "\n").encode()
    return HttpAnswer(error.http_status, body, headers=headers)


def encoded(answer: HttpAnswer, keep: bool) -> bytes:
    """The answer as bytes; ``keep`` says whether the connection stays open after it."""
    head = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        f"Connection: {'keep-alive' if keep else 'close'}",
    ]
    head += [f"{name}: {value}" for name, value in answer.headers.items()]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + answer.body


def head_too_large() -> HttpRefusal:
    reason = f"it is over {HEAD_LIMIT_BYTES} bytes or {HEADERS_LIMIT} lines"
    return HttpRefusal(431, "request head", reason, "send fewer and shorter headers")


def request_line(line: str) -> Tuple[str, str, str]:
    parts = line.split(" ")
    shown = repr(line[:80])
    if len(parts) != 3 or not _TOKEN.match(parts[0]) or not parts[2].startswith("HTTP/"):
        raise HttpRefusal(400, f"request line {shown}", "not HTTP", "send METHOD /path HTTP/1.1")
    if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpRefusal(505, f"request line {shown}", "unknown version", "speak HTTP/1.1")
    return parts[0], parts[1], parts[2]


def headers_of(lines: Sequence[str]) -> Dict[str, str]:
    headers: Dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.match(name):
            asked = f"header {line[:80]!r}"
            raise HttpRefusal(400, asked, "not of the form Name: value", "correct it")
        key = name.lower()
        if key == "content-length" and headers.get(key, value.strip()) != value.strip():
            raise HttpRefusal(400, "Content-Length", "given twice with two values", "give one")
        headers[key] = value.strip()
    return headers


def body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        remedy = "send the body with a Content-Length"
        raise HttpRefusal(501, "Transfer-Encoding", "not supported here", remedy)
    text = headers.get("content-length", "0")
    if not re.match(r"[0-9]{1,12}\Z", text):
        asked = f"Content-Length {text[:40]!r}"
        raise HttpRefusal(400, asked, "not a number of bytes", "send the length of the body")
    if int(text) > BODY_LIMIT_BYTES:
        reason = f"{text} bytes are more than the {BODY_LIMIT_BYTES} that are read"
        raise HttpRefusal(413, "request body", reason, "send less")
    return int(text)


def path_and_query(target: str) -> Tuple[str, Dict[str, str]]:
    try:
        parts = urlsplit(target)
        unquote(parts.path, errors="strict")
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except ValueError as error:
        raise HttpRefusal(400, f"target {target[:80]!r}", str(error), "correct it") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise HttpRefusal(400, f"query {parts.query[:80]!r}", "a name is given twice", "give one")
    return parts.path, query


def keeps_alive(version: str, headers: Mapping[str, str]) -> bool:
    wish = headers.get("connection", "").lower()
    return wish == "keep-alive" if version == "HTTP/1.0" else wish != "close"
