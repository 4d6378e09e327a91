"""A small HTTP/1.1 server for the agent's own doors: the API's unix socket and /metrics.

One thread reads and writes every connection (asyncio), so that a slow, silent or half-closed
client costs a few kilobytes and no thread. A complete request is handed to a lane: a pool with a
fixed number of threads and a bounded queue. Every answer that this module makes by itself is the
JSON of errors.py. It knows nothing of routes or of GPUs.
"""

import asyncio
import logging
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Dict, List, Optional, Sequence, Tuple

from mgpu import log
from mgpu.errors import Conflict, MgpuError
from mgpu.http_message import (
    HEAD_LIMIT_BYTES,
    HEADERS_LIMIT,
    HttpAnswer,
    HttpRefusal,
    HttpRequest,
    body_length,
    encoded,
    error_answer,
    head_too_large,
    headers_of,
    keeps_alive,
    path_and_query,
    request_line,
)
from mgpu.listen import BACKLOG, peer_of

HEAD_TIMEOUT_S = 5.0
BODY_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 15.0
WRITE_TIMEOUT_S = 10.0
LINGER_S = 1.0
STOP_TIMEOUT_S = 5.0
COMPLAIN_EVERY_S = 1.0
CONNECTIONS_LIMIT = 512


class Busy(Conflict):
    """More requests are waiting than the agent queues."""

    http_status = 503


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
        self._complained_at = float("-inf")
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
        for site in self._sites if self._loop is None else ():
            site.listener.close()
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
        self._loop.set_exception_handler(self._complain)
        self._stopped = asyncio.Event()
        servers = []
        for site in self._sites:
            unix = site.listener.family == socket.AF_UNIX
            start: Any = asyncio.start_unix_server if unix else asyncio.start_server
            serve = self._server_of(site)
            options: Dict[str, Any] = {"sock": site.listener, "limit": HEAD_LIMIT_BYTES}
            if unix and sys.version_info >= (3, 13):
                options["cleanup_socket"] = False  # the file is for listen.remove_socket
            # The backlog again: asyncio would listen anew with its own, much shorter one.
            servers.append(await start(serve, backlog=BACKLOG, **options))
        self._settled.set()
        await self._stopped.wait()
        for server in servers:
            server.close()
        for task in [task for task, connection in self._open.items() if not connection.busy]:
            task.cancel()
        if self._open:
            await asyncio.wait(list(self._open), timeout=STOP_TIMEOUT_S)

    def _complain(self, _: asyncio.AbstractEventLoop, context: Dict[str, Any]) -> None:
        """What asyncio meets by itself, such as no descriptor for a client: a line a second."""
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN_EVERY_S:
            self._complained_at = now
            log.warning("http-server", what=context["message"], why=context.get("exception", ""))

    def _server_of(
        self, site: Site
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            assert self._stopped is not None
            connection = _Connection(site, reader, writer, self._limits, self._stopped.is_set)
            self._open[task] = connection
            try:
                if len(self._open) > self._limits.connections:
                    await connection.turn_away()
                else:
                    await connection.serve()
            except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as gone:
                log.event("client-gone", logging.DEBUG, why=repr(gone))
            except Exception:
                log.fault("http-connection-failed")
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
        stopping: Callable[[], bool],
    ) -> None:
        self._site = site
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._stopping = stopping
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
            keep = keep and not self._stopping()
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
        method, target, version = request_line(lines[0])
        headers = headers_of(lines[1:])
        length = body_length(headers)
        if length and headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _in_time(self._body(length), limits.body_timeout_s, "request body")
        path, query = path_and_query(target)
        request = HttpRequest(method, path, query, headers, body, self._peer)
        return request, keeps_alive(version, headers)

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
                raise head_too_large()
            text = line.rstrip(b"\r\n").decode("latin-1")
            if text:
                lines.append(text)
            elif lines:
                return lines

    async def _line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError:
            raise head_too_large() from None

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
        self._writer.write(encoded(answer, keep))
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
