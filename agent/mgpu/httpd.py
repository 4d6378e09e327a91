"""A small HTTP/1.1 server for the agent's own doors: the API's unix socket and /metrics.

One thread reads and writes every connection (asyncio), so that a slow, silent or half-closed
client costs a few kilobytes and no thread. A complete request is handed to a lane: a pool with a
fixed number of threads and a bounded queue. Every answer that this module makes by itself is the
JSON of errors.py. It knows nothing of routes or of GPUs.
"""

import asyncio
import json
import logging
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Awaitable, Callable, Dict, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import parse_qsl, unquote, urlsplit

from mgpu import log
from mgpu.errors import BadInput, Conflict, MgpuError
from mgpu.listen import Peer, peer_of

HEAD_LIMIT_BYTES = 16 * 1024
HEADERS_LIMIT = 64
BODY_LIMIT_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 5.0
BODY_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 15.0
WRITE_TIMEOUT_S = 10.0
LINGER_S = 1.0
STOP_TIMEOUT_S = 5.0
CONNECTIONS_LIMIT = 512
JSON_TYPE = "application/json"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


class HttpRefusal(BadInput):
    """A request that HTTP itself forbids; ``http_status`` says how."""

    def __init__(self, status: int, asked: str, reason: str, remedy: str) -> None:
        super().__init__(asked, reason, remedy)
        self.http_status = status
        self.headers: Dict[str, str] = {}


class Busy(Conflict):
    """More requests are waiting than the agent queues."""

    http_status = 503


@dataclass(frozen=True)
class HttpRequest:
    """One complete request. ``peer`` is None on a TCP socket."""

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


class Lane:
    """A fixed number of threads and a bounded queue before them."""

    def __init__(self, name: str, threads: int, waiting_limit: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"mgpu-{name}")
        self._room = threads + waiting_limit
        self._inside = 0

    async def call(self, work: Callable[[], HttpAnswer]) -> HttpAnswer:
        """Run ``work`` on a thread of the lane. Raises Busy. Only for the server's own loop."""
        if self._inside >= self._room:
            raise Busy("request", f"{self._inside} others are waiting already", "try again")
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._inside -= 1

    def stop(self) -> None:
        """Let what runs end; no thread stays."""
        self._pool.shutdown(wait=True)


@dataclass(frozen=True)
class Site:
    """A listening socket, what answers there and on which lane a request runs."""

    listener: socket.socket
    handler: Callable[[HttpRequest], HttpAnswer]
    lane_of: Callable[[HttpRequest], Lane]


@dataclass(frozen=True)
class Limits:
    """How long and how much the server bears from one client, and how many of them."""

    head_timeout_s: float = HEAD_TIMEOUT_S
    body_timeout_s: float = BODY_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    write_timeout_s: float = WRITE_TIMEOUT_S
    connections: int = CONNECTIONS_LIMIT


class HttpServer:
    """Serves its sites from one thread until ``stop``."""

    def __init__(self, sites: Sequence[Site], limits: Optional[Limits] = None) -> None:
        self._sites = tuple(sites)
        self._limits = limits or Limits()
        self._open: Dict[asyncio.Task[None], _Connection] = {}
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._stopped: Optional[asyncio.Event] = None
        self._failure: Optional[BaseException] = None
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mgpu-http", daemon=True)

    def start(self) -> None:
        """Begin to answer; returns once every site is served. Raises what stood in the way."""
        self._thread.start()
        self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Close the listeners and every connection; a request that runs may end first."""
        if self._loop is not None and self._stopped is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:
            self._failure = failure
            log.fault("http-server-failed")
        finally:
            self._settled.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        servers = []
        for site in self._sites:
            unix = site.listener.family == socket.AF_UNIX
            start: Any = asyncio.start_unix_server if unix else asyncio.start_server
            serve = self._server_of(site)
            servers.append(await start(serve, sock=site.listener, limit=HEAD_LIMIT_BYTES))
        self._settled.set()
        await self._stopped.wait()
        for server in servers:
            server.close()
        for task in [task for task, connection in self._open.items() if not connection.busy]:
            task.cancel()
        if self._open:
            await asyncio.wait(list(self._open), timeout=STOP_TIMEOUT_S)

    def _server_of(
        self, site: Site
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connection = _Connection(site, reader, writer, self._limits)
            self._open[task] = connection
            try:
                if len(self._open) > self._limits.connections:
                    await connection.turn_away()
                else:
                    await connection.serve()
            except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as gone:
                log.event("client-gone", logging.DEBUG, why=repr(gone))
            finally:
                del self._open[task]
                writer.transport.abort()

        return serve


class _Connection:
    """One client: its requests, one after the other."""

    def __init__(
        self,
        site: Site,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
    ) -> None:
        self._site = site
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._peer = peer_of(writer.get_extra_info("socket"))
        self.busy = False
        # drain() shall mean sent: what is left in the buffer would be lost at the end.
        writer.transport.set_write_buffer_limits(high=0)

    async def turn_away(self) -> None:
        await self._last_word(Busy("connection", "too many clients at once", "try again"))

    async def serve(self) -> None:
        while True:
            try:
                request, keep = await self._next_request()
            except HttpRefusal as refusal:
                await self._last_word(refusal)
                return
            except EOFError:
                return
            self.busy = True
            answer = await self._answer(request)
            await self._send(answer, keep)
            self.busy = False
            if not keep:
                await self._linger()
                return

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        """Always an answer: an error that nobody foresaw is logged and told as such."""

        def work() -> HttpAnswer:
            try:
                return self._site.handler(request)
            except MgpuError as error:
                return error_answer(error)
            except Exception as error:
                log.fault("request-failed", method=request.method, path=request.path)
                asked = f"{request.method} {request.path}"
                remedy = "see the agent's journal and report it"
                return error_answer(MgpuError(asked, f"the agent failed: {error!r}", remedy))

        try:
            return await self._site.lane_of(request).call(work)
        except Busy as busy:
            return error_answer(busy)

    async def _next_request(self) -> Tuple[HttpRequest, bool]:
        """The next request and whether the connection stays open after it.

        Raises EOFError when the client is done, HttpRefusal when it cannot be served.
        """
        limits = self._limits
        try:
            first = await asyncio.wait_for(self._reader.read(1), limits.idle_timeout_s)
        except asyncio.TimeoutError:
            raise EOFError from None
        if not first:
            raise EOFError
        lines = await _in_time(self._head_lines(first), limits.head_timeout_s, "request head")
        method, target, version = _request_line(lines[0])
        headers = _headers(lines[1:])
        length = _body_length(headers)
        if length and headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _in_time(self._body(length), limits.body_timeout_s, "request body")
        path, query = _path_and_query(target)
        request = HttpRequest(method, path, query, headers, body, self._peer)
        return request, _keeps_alive(version, headers)

    async def _head_lines(self, first: bytes) -> List[str]:
        lines: List[str] = []
        size = 0
        start = first
        while True:
            line = start if start == b"\n" else start + await self._line()
            start = b""
            size += len(line)
            if not line.endswith(b"\n"):
                raise HttpRefusal(400, "request head", "it ends in the middle", "send all of it")
            if size > HEAD_LIMIT_BYTES or len(lines) > HEADERS_LIMIT:
                raise _head_too_large()
            text = line.rstrip(b"\r\n").decode("latin-1")
            if text:
                lines.append(text)
            elif lines:
                return lines

    async def _line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError:
            raise _head_too_large() from None

    async def _body(self, length: int) -> bytes:
        try:
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as short:
            raise HttpRefusal(
                400,
                "request body",
                f"{len(short.partial)} of the {length} bytes that Content-Length promised came",
                "send all of it",
            ) from None

    async def _send(self, answer: HttpAnswer, keep: bool) -> None:
        phrase = HTTPStatus(answer.status).phrase
        head = [
            f"HTTP/1.1 {answer.status} {phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            f"Connection: {'keep-alive' if keep else 'close'}",
        ]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        self._writer.write("\r\n".join([*head, "", ""]).encode("latin-1") + answer.body)
        await asyncio.wait_for(self._writer.drain(), self._limits.write_timeout_s)

    async def _last_word(self, error: MgpuError) -> None:
        await self._send(error_answer(error), keep=False)
        await self._linger()

    async def _linger(self) -> None:
        """End our side and swallow what is still coming.

        A close with unread bytes resets the connection, and the client would lose the answer.
        """
        if self._writer.can_write_eof():
            self._writer.write_eof()
        try:
            await asyncio.wait_for(self._swallow(), LINGER_S)
        except asyncio.TimeoutError:
            return

    async def _swallow(self) -> None:
        while await self._reader.read(HEAD_LIMIT_BYTES):
            continue


async def _in_time(work: Awaitable[Any], timeout_s: float, what: str) -> Any:
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        reason = f"it did not come within {timeout_s:g} s"
        raise HttpRefusal(408, what, reason, "send it at once") from None


def _head_too_large() -> HttpRefusal:
    reason = f"it is over {HEAD_LIMIT_BYTES} bytes or {HEADERS_LIMIT} lines"
    return HttpRefusal(431, "request head", reason, "send fewer and shorter headers")


def _request_line(line: str) -> Tuple[str, str, str]:
    parts = line.split(" ")
    shown = repr(line[:80])
    if len(parts) != 3 or not _TOKEN.match(parts[0]) or not parts[2].startswith("HTTP/"):
        raise HttpRefusal(400, f"request line {shown}", "not HTTP", "send METHOD /path HTTP/1.1")
    if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpRefusal(505, f"request line {shown}", "unknown version", "speak HTTP/1.1")
    return parts[0], parts[1], parts[2]


def _headers(lines: Sequence[str]) -> Dict[str, str]:
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


def _body_length(headers: Mapping[str, str]) -> int:
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


def _path_and_query(target: str) -> Tuple[str, Dict[str, str]]:
    try:
        parts = urlsplit(target)
        path = unquote(parts.path, errors="strict")
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
    except ValueError as error:
        raise HttpRefusal(400, f"target {target[:80]!r}", str(error), "correct it") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise HttpRefusal(400, f"query {parts.query[:80]!r}", "a name is given twice", "give one")
    return path, query


def _keeps_alive(version: str, headers: Mapping[str, str]) -> bool:
    wish = headers.get("connection", "").lower()
    return wish == "keep-alive" if version == "HTTP/1.0" else wish != "close"
