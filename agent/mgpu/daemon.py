"""mgpu-agent: the command line of the agent, and the loop that keeps the node right.

``run`` stays in the foreground. Everything that the loop does is idempotent; a fault in one round
is logged and the next round tries again, but only a round that went through feeds the watchdog.
"""

import argparse
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import List, Optional, TextIO

from mgpu import __version__, log
from mgpu.agent import Agent
from mgpu.config import Config
from mgpu.errors import AlreadyRunning, MgpuError, NotPermitted
from mgpu.sdnotify import ServiceManager

EXIT_OK = 0


class Daemon:
    """The agent's process: lock, signals, watchdog, and the rounds of the loop."""

    def __init__(self, config_path: Optional[Path]) -> None:
        self._config_path = config_path
        self._config = Config.load(config_path)
        self._manager = ServiceManager()
        self._wake = threading.Event()
        self._stopping = False
        self._reloading = False

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Limits, gates and nodes stay when it ends."""
        _require_root()
        log.setup(self._config.log_level)
        with _only_one(self._config.run_dir):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, self._on_signal)
            agent = Agent(self._config, self._wake.set)
            try:
                agent.start()
                log.event("agent-ready", logging.INFO, version=__version__, **agent.summary())
                self._manager.ready()
                self._loop(agent)
            finally:
                self._manager.stopping()
                agent.stop()
        log.event("agent-stopped", note="limits stay in place")

    def _loop(self, agent: Agent) -> None:
        due = 0.0
        healthy = True
        while not self._stopping:
            pause = max(0.0, due - time.monotonic())
            if self._manager.watchdog_s is not None:
                pause = min(pause, self._manager.watchdog_s / 3)
            self._wake.wait(pause)
            self._wake.clear()
            if self._reloading:
                self._reload(agent)
            full = time.monotonic() >= due
            if full:
                due = time.monotonic() + self._config.reconcile_interval_s
            if self._stopping:
                return
            if full:
                healthy = agent.round(True)
            elif not agent.round(False):
                healthy = False
            if healthy:
                self._manager.alive()

    def _reload(self, agent: Agent) -> None:
        """Take a new agent.conf; one that cannot be used changes nothing."""
        self._reloading = False
        self._manager.reloading()
        try:
            new = Config.load(self._config_path)
        except MgpuError as error:
            log.error("reload-refused", why=error)
        else:
            for key in self._config.waiting_for_restart(new):
                log.warning("reload-needs-restart", key=key)
            self._config = new
            log.setup(new.log_level)
            agent.reconfigure(new)
            log.event("reloaded")
        self._manager.ready()

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            self._reloading = True
        else:
            self._stopping = True
        self._wake.set()


class _only_one:
    """One agent a node: a lock on a file in the run folder, which any death gives up."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "agent.lock"
        self._file: Optional[TextIO] = None

    def __enter__(self) -> None:
        os.makedirs(self._path.parent, mode=0o755, exist_ok=True)
        self._file = open(self._path, "a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            raise AlreadyRunning(
                "mgpu-agent", f"another one runs on this node (PID {holder})", "stop that one first"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _require_root() -> None:
    if os.geteuid() != 0:
        raise NotPermitted("mgpu-agent", "needs root (BPF, device nodes, cgroups)", "use sudo")


def _teardown(config: Config) -> None:
    _require_root()
    log.setup(config.log_level)
    with _only_one(config.run_dir):
        for line in Agent(config, lambda: None).teardown():
            print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mgpu-agent", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"mgpu-agent {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="instead of agent.conf in /etc")
    parser.add_argument(
        "--check-config", action="store_true", help="say whether the configuration can be used"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("run", help="serve in the foreground (what the unit does)")
    commands.add_parser(
        "teardown", help="remove every trace: programs, gates, nodes, cgroups, what is given out"
    )
    return parser


def main(argv: Optional[List[str]] = None) -> int:
    """Entry point. Exit codes: those of mgpu.errors; 2 for a wrong command line."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.check_config:
            Config.load(arguments.config)
            print("configuration is usable")
        elif arguments.command == "run":
            Daemon(arguments.config).run()
        elif arguments.command == "teardown":
            _teardown(Config.load(arguments.config))
        else:
            parser.error("say what to do: run, teardown or --check-config")
    except MgpuError as error:
        print(f"mgpu-agent: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
