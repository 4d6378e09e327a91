"""The routes of the API on the unix socket: which request is which verb of the service.

docs/api.md lists them; its test holds page and code together. Reading and changing run on lanes of
their own, so that a change that waits for the kernel holds up nobody who only looks.
"""

import os
import re
from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping, Optional, Pattern, Sequence, Tuple
from urllib.parse import unquote

from mgpu import body, log
from mgpu.errors import BadInput, MgpuError, NotPermitted
from mgpu.http_message import HttpAnswer, HttpRefusal, HttpRequest, json_answer
from mgpu.httpd import Lane, Site
from mgpu.listen import remove_socket, unix_socket
from mgpu.model import Enforcer
from mgpu.ports import Peer
from mgpu.service import Json, Service
from mgpu.units import shown

READ_THREADS = 4
READS_WAITING = 512
CHANGES_WAITING = 256

Values = Mapping[str, object]
Fields = Mapping[str, body.Reader]

_ENFORCER = body.one_of("default", *(enforcer.value for enforcer in Enforcer))
REQUEST_FIELDS: Fields = {
    "core": body.raw,
    "memory_mib": body.raw,
    "cards": body.raw,
    "device": body.raw,
    "online": body.flag,
    "enforcer": _ENFORCER,
    "name": body.text,
    "privileged": body.flag,
    "rdma": body.flag,
    "containers_in_pod": body.number(1),
}
BIND_FIELDS: Fields = {**REQUEST_FIELDS, "target": body.text, "pod_uid": body.text}
RUN_FIELDS: Fields = {**REQUEST_FIELDS, "pid": body.number(1)}
SET_FIELDS: Fields = {
    "core": body.raw,
    "memory_mib": body.raw,
    "online": body.flag,
    "enforcer": _ENFORCER,
    "force": body.flag,
}
POLICY_FIELDS: Fields = {"policy": body.raw}


@dataclass(frozen=True)
class Call:
    """One request taken apart: what its route asked to have read."""

    item: str
    query: Mapping[str, str]
    values: Values
    peer: Peer


@dataclass(frozen=True)
class Route:
    """``pattern`` is matched against the whole path; its group is the item."""

    method: str
    path: str
    verb: str
    run: Callable[[Service, Call], Json]
    fields: Optional[Fields] = None
    required: Sequence[str] = ()
    query: Sequence[str] = ()

    @property
    def changes(self) -> bool:
        return self.method != "GET"

    @property
    def pattern(self) -> Pattern[str]:
        return re.compile(re.sub(r"\{\w+\}", "([^/]+)", self.path) + r"\Z")


ROUTES: Sequence[Route] = (
    Route("GET", "/v1/status", "status", lambda s, c: s.status()),
    Route("GET", "/v1/devices", "devices", lambda s, c: s.device_info()),
    Route("GET", "/v1/devices/{device}/policy", "policy", lambda s, c: s.policy(c.item)),
    Route(
        "PUT",
        "/v1/devices/{device}/policy",
        "policy",
        lambda s, c: s.set_policy(c.item, c.values["policy"]),
        POLICY_FIELDS,
        ("policy",),
    ),
    Route("GET", "/v1/containers", "containers", lambda s, c: s.container_info()),
    Route("GET", "/v1/containers/{id}", "container", lambda s, c: s.container_info(c.item)),
    Route(
        "POST",
        "/v1/containers",
        "bind",
        lambda s, c: s.bind(c.values),
        BIND_FIELDS,
        ("target", "core"),
    ),
    Route(
        "POST",
        "/v1/runs",
        "run",
        lambda s, c: s.start_run(c.values, c.peer),
        RUN_FIELDS,
        ("pid", "core"),
    ),
    Route(
        "PATCH",
        "/v1/containers/{id}",
        "set",
        lambda s, c: s.set(c.item, c.values),
        SET_FIELDS,
    ),
    Route(
        "DELETE",
        "/v1/containers/{id}",
        "release",
        lambda s, c: s.release(c.item, _force(c.query)),
        query=("force",),
    ),
    Route("GET", "/v1/check", "check", lambda s, c: s.check()),
    Route("GET", "/v1/top", "top", lambda s, c: s.top()),
)


class Api:
    """The service behind HTTP requests; every change is logged with who asked for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reads = Lane("read", READ_THREADS, READS_WAITING)
        self._changes = Lane("change", 1, CHANGES_WAITING)
        self._socket: Optional[Tuple[str, int]] = None
        self._routes = [(route.pattern, route) for route in ROUTES]

    def site(self, socket_path: str, group: str) -> Site:
        """The API at ``socket_path``. Raises as listen.unix_socket does."""
        listener = unix_socket(socket_path, group)
        self._socket = socket_path, os.lstat(socket_path).st_ino
        return Site(listener, self.answer, self._lane)

    def stop(self) -> None:
        """After the server: takes the socket away and waits for what still runs."""
        if self._socket is not None:
            remove_socket(*self._socket)
        self._reads.stop()
        self._changes.stop()

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """The answer of the route. Raises MgpuError."""
        route, item = self._find(request)
        if request.peer is None:
            raise NotPermitted("request", "the API is served on a unix socket alone", "use it")
        call = Call(item, _query(route, request), _values(route, request), request.peer)
        if not route.changes:
            return json_answer(route.run(self._service, call))
        try:
            result = route.run(self._service, call)
        except MgpuError as error:
            _log_change(route, call, error.code, str(error))
            raise
        _log_change(route, call, "ok", str(result.get("id", "")))
        return json_answer(result, 201 if request.method == "POST" else 200)

    def _lane(self, request: HttpRequest) -> Lane:
        return self._reads if request.method in ("GET", "HEAD") else self._changes

    def _find(self, request: HttpRequest) -> Tuple[Route, str]:
        allowed: List[str] = []
        for pattern, route in self._routes:
            match = pattern.match(request.path)
            if match and route.method == request.method:
                return route, unquote(match.group(1)) if match.groups() else ""
            if match:
                allowed.append(route.method)
        asked = f"{request.method} {shown(request.path)}"
        if not allowed:
            raise HttpRefusal(404, asked, "no such path", "see docs/api.md")
        refusal = HttpRefusal(405, asked, "no such method there", f"use {' or '.join(allowed)}")
        refusal.headers["Allow"] = ", ".join(allowed)
        raise refusal


def _query(route: Route, request: HttpRequest) -> Mapping[str, str]:
    for name in request.query:
        if name not in route.query:
            remedy = f"use {', '.join(route.query)}" if route.query else "leave it out"
            raise BadInput(f"query {shown(name)}", "unknown here", remedy)
    return request.query


def _values(route: Route, request: HttpRequest) -> Values:
    if route.fields is not None:
        return body.read(request.body, route.fields, route.required)
    if request.body:
        raise BadInput("request body", f"{route.method} {route.path} takes none", "leave it out")
    return {}


def _force(query: Mapping[str, str]) -> bool:
    words: Dict[str, bool] = {"0": False, "1": True}
    text = query.get("force", "0")
    if text not in words:
        raise BadInput(f"force {shown(text)}", "neither 0 nor 1", "give one of them")
    return words[text]


def _log_change(route: Route, call: Call, result: str, detail: str) -> None:
    peer = call.peer
    log.event(
        f"api-{route.verb}",
        result=result,
        detail=detail,
        item=call.item,
        request=" ".join(f"{name}={value}" for name, value in call.values.items()),
        peer_pid=peer.pid,
        peer_uid=peer.uid,
        peer_gid=peer.gid,
    )
