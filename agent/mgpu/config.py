"""agent.conf: every key, its default and what it may be. docs/configuration.md explains each.

An INI file with one section, [agent]. Read by a parser of our own, which can name the line of
every complaint; unknown sections and keys are refused, so that a slip of the pen is not a default.
"""

import difflib
import os
import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, TypeVar

from mgpu.errors import ConfigInvalid
from mgpu.model import Enforcer, Policy
from mgpu.placement import Strategy
from mgpu.units import shown

DEFAULT_PATH = Path("/etc/mgpu/agent.conf")
SECTION = "agent"
LARGEST_FILE_BYTES = 64 * 1024
LONGEST_SOCKET_PATH = 107  # bytes: sun_path has 108, the last a NUL

DEFAULT_GUARD = (
    "/kubepods",
    "/kubepods.slice",
    "/docker",
    "/system.slice/docker-*.scope",
    "/libpod_parent",
    "/machine.slice/libpod-*.scope",
)

T = TypeVar("T")


class Listen(NamedTuple):
    """Where to serve metrics. Port 0: any free one."""

    host: str
    port: int


DEFAULT_METRICS: Optional[Listen] = Listen("127.0.0.1", 19735)


class _Wrong(ValueError):
    """A value that a key cannot have: ``reason`` and ``remedy`` of the ConfigInvalid to come."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


def _key(default: T, parse: Callable[[str], T], live: bool = False) -> T:
    """A field of Config; ``live``: a reload (SIGHUP) is enough for a new value."""
    return field(default=default, metadata={"parse": parse, "live": live})


def _path(text: str) -> Path:
    if not text.startswith("/") or "\0" in text:
        raise _Wrong("not an absolute path", "write a path that begins with /")
    return Path(os.path.normpath(text))


def _socket(text: str) -> Path:
    path = _path(text)
    if len(os.fsencode(str(path))) > LONGEST_SOCKET_PATH:
        raise _Wrong(
            f"longer than the {LONGEST_SOCKET_PATH} bytes that a socket's path may have",
            "choose a shorter one",
        )
    return path


def _listen(text: str) -> Optional[Listen]:
    if not text:
        return None
    match = re.match(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]\s]+)):([0-9]{1,5})\Z", text)
    if not match or int(match.group(3)) > 65535:
        raise _Wrong(
            "not an address and port",
            "write one such as 127.0.0.1:19735, or nothing to turn it off",
        )
    return Listen(match.group(1) or match.group(2), int(match.group(3)))


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not re.match(r"[0-9]{1,9}(\.[0-9]{1,3})?\Z", text) or not least <= float(text) <= most:
            raise _Wrong("not a number in range", f"write a number from {least:g} to {most:g}")
        return float(text)

    return parse


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.match(r"[0-9]{1,9}\Z", text) or not least <= int(text) <= most:
            raise _Wrong("not a whole number in range", f"write one from {least} to {most}")
        return int(text)

    return parse


def _mode(text: str) -> int:
    if not re.match(r"0?[0-7]{3}\Z", text):
        raise _Wrong("not an octal mode", "write one such as 0666")
    return int(text, 8)


def _name(text: str) -> str:
    if not re.match(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\Z", text):
        raise _Wrong("not the name or number of a user or group", "write one such as mgpu")
    return text


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise _Wrong("no such choice", f"write one of {', '.join(words)}")
        return text

    return parse


def _enforce(text: str) -> Optional[Enforcer]:
    word = _word("auto", *(enforcer.value for enforcer in Enforcer))(text)
    return None if word == "auto" else Enforcer(word)


def _policy(text: str) -> Policy:
    return {p.label: p for p in Policy}[_word(*(policy.label for policy in Policy))(text)]


def _strategy(text: str) -> Strategy:
    return Strategy(_word(*(strategy.value for strategy in Strategy))(text))


def _paths(text: str) -> Tuple[Path, ...]:
    return () if text == "auto" else tuple(_path(part) for part in _list(text))


def _auto_path(text: str) -> Optional[Path]:
    return None if text == "auto" else _path(text)


def _globs(text: str) -> Tuple[str, ...]:
    found = _list(text)
    for glob in found:
        if not glob.startswith("/") or glob == "/" or ".." in glob.split("/"):
            raise _Wrong(
                f"{shown(glob)} is no path below the root of the cgroup tree",
                "write globs such as /kubepods.slice or /system.slice/docker-*.scope, or nothing",
            )
    return tuple(glob.rstrip("/") for glob in found)


def _list(text: str) -> List[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Config:
    """The agent's configuration; field names are the keys."""

    socket: Path = _key(Path("/run/mgpu/agent.sock"), _socket)
    group: str = _key("mgpu", _name)
    state: Path = _key(Path("/var/lib/mgpu/state.db"), _path)
    metrics_listen: Optional[Listen] = _key(DEFAULT_METRICS, _listen)

    policy: Policy = _key(Policy.FIXED_SHARE, _policy, live=True)
    card_placement: Strategy = _key(Strategy.BINPACK, _strategy, live=True)
    node_placement: Strategy = _key(Strategy.SPREAD, _strategy, live=True)
    reserve_mib: int = _key(0, _whole(0, 1024 * 1024), live=True)

    tracker: str = _key("auto", _word("auto", "cuda", "nvml"))
    enforce: Optional[Enforcer] = _key(None, _enforce, live=True)
    attachments: str = _key("auto", _word("auto", "link", "fds"))
    context_mib: int = _key(256, _whole(0, 16 * 1024), live=True)
    libcuda_paths: Tuple[Path, ...] = _key((), _paths, live=True)
    guard: Tuple[str, ...] = _key(DEFAULT_GUARD, _globs, live=True)
    node_owner: str = _key("root", _name)
    node_group: str = _key("root", _name)
    node_mode: int = _key(0o666, _mode)

    reconcile_interval_s: float = _key(5.0, _number(0.1, 3600), live=True)
    log_level: str = _key("info", _word("debug", "info", "warning", "error"), live=True)
    simulation: str = _key("auto", _word("auto", "yes", "no"))

    dev_root: Path = _key(Path("/dev"), _path)
    proc_root: Path = _key(Path("/proc"), _path)
    cgroup_root: Path = _key(Path("/sys/fs/cgroup"), _path)
    bpf_root: Path = _key(Path("/sys/fs/bpf/mgpu"), _path)
    bpf_source: Optional[Path] = _key(None, _auto_path)
    run_dir: Path = _key(Path("/run/mgpu"), _path)

    @classmethod
    def load(cls, path: Optional[Path] = None) -> "Config":
        """The configuration in ``path``; None: that in DEFAULT_PATH, all defaults without it.

        Raises ConfigInvalid, which names the file, the line, the key and what would do.
        """
        if path is None:
            path = DEFAULT_PATH
            if not os.path.lexists(str(path)):
                return cls()
        return cls.parse(_read(path), str(path))

    @classmethod
    def parse(cls, text: str, origin: str = "agent.conf") -> "Config":
        """The configuration in ``text``; ``origin`` names it in errors."""
        values: Dict[str, Any] = {}
        for line_number, key, value in _assignments(text, origin):
            where = f"{origin} line {line_number}"
            if key not in KEYS:
                raise ConfigInvalid(f"{where}, {shown(key)}", "no such key", _similar(key))
            if key in values:
                raise ConfigInvalid(f"{where}, {key}", "given twice", "keep one of the two")
            try:
                values[key] = KEYS[key].parse(value)
            except _Wrong as wrong:
                raise ConfigInvalid(
                    f"{where}, {key} = {shown(value)}", wrong.reason, wrong.remedy
                ) from wrong
        return cls(**values)

    def waiting_for_restart(self, new: "Config") -> List[str]:
        """The keys whose value in ``new`` differs and takes effect only at the next start."""
        return [
            name
            for name, key in KEYS.items()
            if not key.live and getattr(self, name) != getattr(new, name)
        ]


class Key(NamedTuple):
    """One key of agent.conf: how to read it, and whether a reload is enough to change it."""

    parse: Callable[[str], Any]
    default: Any
    live: bool


KEYS: Dict[str, Key] = {
    item.name: Key(item.metadata["parse"], item.default, item.metadata["live"])
    for item in fields(Config)
    if item.default is not MISSING
}


def _read(path: Path) -> str:
    try:
        with open(str(path), "rb") as stream:
            data = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigInvalid(
            str(path), f"cannot be read ({error.strerror})", "name a file that root can read"
        ) from error
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigInvalid(
            str(path), f"larger than {LARGEST_FILE_BYTES} bytes", "name the agent's own file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigInvalid(
            f"{path} line {line}", "not UTF-8 text", "write it as plain text"
        ) from error


def _assignments(text: str, origin: str) -> List[Tuple[int, str, str]]:
    """(line, key, value) of [agent]. A ``#`` or ``;`` at the start or after a blank: a comment."""
    found = []
    section = None
    for line_number, raw in enumerate(text.split("\n"), 1):
        line = re.sub(r"(^|\s)[#;].*", "", raw).strip()
        where = f"{origin} line {line_number}"
        if not line:
            continue
        if line.startswith("["):
            section = line
            if section != f"[{SECTION}]":
                raise ConfigInvalid(
                    f"{where}, {shown(line)}", "no such section", f"the only one is [{SECTION}]"
                )
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not key:
            raise ConfigInvalid(f"{where}, {shown(line)}", "not a setting", "write: key = value")
        if section is None:
            raise ConfigInvalid(
                f"{where}, {shown(key)}", "before any section", f"put [{SECTION}] above it"
            )
        found.append((line_number, key, value))
    return found


def _similar(key: str) -> str:
    close = difflib.get_close_matches(key, list(KEYS), n=1)
    return f"did you mean {close[0]}?" if close else "docs/configuration.md lists the keys"
