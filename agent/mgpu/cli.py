"""mgpu-cli: a client of the agent. Parses, asks, prints; docs/cli.md is its page.

Imports only what every command needs, so that a listing is quick.
"""

import argparse
import io
import json
import os
import sys
from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

from mgpu import __version__, tables_text
from mgpu.client import DEFAULT_SOCKET, Client
from mgpu.errors import BadInput, MgpuError

RUN_FAILED = 125
BROKEN_PIPE = 128 + 13
INTERRUPTED = 128 + 2

Json = Dict[str, Any]


class _Parser(argparse.ArgumentParser):
    """Errors as every other error: one line and the exit code of bad input.

    No abbreviations: a script that uses one would break when another option is added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise BadInput("command line", " ".join(message.split()), f"see '{self.prog} --help'")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns its exit code (docs/cli.md)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A container's name may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except MgpuError as error:
        _complain(str(error))
        return RUN_FAILED if _verb(arguments) == "run" else error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return BROKEN_PIPE
    except OSError as error:
        _give_up_output()
        _complain(f"output: {error.strerror}; nothing else went wrong")
        return MgpuError.exit_code


def _main(arguments: Sequence[str]) -> int:
    given, rest = list(arguments), []
    if _verb(arguments) == "run" and "--" in arguments:
        cut = given.index("--")
        given, rest = given[:cut], given[cut + 1 :]
    options = _parser().parse_args(given, argparse.Namespace(argv=rest))
    command: Callable[[argparse.Namespace, Client], int] = options.command
    return command(options, Client(options.socket))


def _verb(arguments: Sequence[str]) -> str:
    """The command, also of a command line that cannot be parsed."""
    previous = ""
    for word in arguments:
        if not word.startswith("-") and previous != "--socket":
            return word
        previous = word
    return ""


def _give_up_output() -> None:
    """What is left in the buffer has nowhere to go; the interpreter must not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _complain(line: str) -> None:
    print(f"mgpu-cli: {line}", file=sys.stderr)


def _warn(answer: Json) -> None:
    for warning in answer.get("warnings", []):
        _complain(f"warning: {warning}")


def _show(options: argparse.Namespace, answer: Json, table: str) -> int:
    """Print the answer as JSON or as its table."""
    if options.output == "json":
        print(json.dumps(answer, indent=2))
    elif table:
        print(table)
    return 0


# Commands


def _device_info(options: argparse.Namespace, client: Client) -> int:
    answer = client.devices()
    if options.device is not None:
        wanted = (options.device,)
        rows = [r for r in answer["devices"] if {str(r["device_id"]), r["device_uuid"]} & {*wanted}]
        if not rows:
            raise _no_device(options.device, answer["devices"])
        answer["devices"] = rows
    return _show(options, answer, tables_text.devices(answer["devices"], options.all))


def _no_device(device: str, rows: Sequence[Json]) -> MgpuError:
    from mgpu.errors import NotFound

    known = ", ".join(str(row["device_id"]) for row in rows)
    return NotFound(f"device {device}", "no such device on this node", f"choose one of {known}")


def _container_info(options: argparse.Namespace, client: Client) -> int:
    one = options.container
    answer = client.containers() if one is None else client.container(one)
    return _show(options, answer, tables_text.containers(answer["containers"]))


def _bind(options: argparse.Namespace, client: Client) -> int:
    answer = client.bind({"target": options.target, **request_of(options)})
    _warn(answer)
    return _show(options, answer, tables_text.containers(answer["containers"]))


def _run(options: argparse.Namespace, client: Client) -> int:
    from mgpu.cli_run import run

    if not options.argv:
        raise BadInput("command line", "no command to run", "write it after --")
    return run(client, request_of(options), options.argv, _complain)


def _set(options: argparse.Namespace, client: Client) -> int:
    changes: Json = {"core": options.core, "memory_mib": options.memory}
    changes.update(online=options.online, enforcer=options.enforcer, force=options.force or None)
    given = {name: value for name, value in changes.items() if value is not None}
    answer = client.set(options.container, given)
    _warn(answer)
    return _show(options, answer, tables_text.containers(answer["containers"]))


def _release(options: argparse.Namespace, client: Client) -> int:
    answer = client.release(options.container, options.force)
    _warn(answer)
    return _show(options, answer, f"released {answer['released'][:12]}")


def _policy(options: argparse.Namespace, client: Client) -> int:
    if options.policy is None:
        answer = client.policy(options.device)
    else:
        answer = client.set_policy(options.device, options.policy)
    _warn(answer)
    number, name = answer["compute_policy"], answer["compute_policy_name"]
    return _show(options, answer, f"device {answer['device_id']}: {number} {name}")


def _check(options: argparse.Namespace, client: Client) -> int:
    answer = client.check()
    return _show(options, answer, tables_text.checks(answer["checks"]))


def _status(options: argparse.Namespace, client: Client) -> int:
    answer = client.status()
    return _show(options, answer, tables_text.pairs(answer))


def _top(options: argparse.Namespace, client: Client) -> int:
    if options.output == "json":
        return _show(options, client.top(), "")
    from mgpu.cli_top import top

    return top(client, options.interval, options.once)


def request_of(options: argparse.Namespace) -> Json:
    """The fields of a request as the API takes them; what was not given is left out."""
    fields = {
        "core": options.core,
        "memory_mib": options.memory,
        "cards": options.cards,
        "device": options.device,
        "online": options.online,
        "enforcer": options.enforcer,
        "name": options.name,
    }
    return {name: value for name, value in fields.items() if value is not None}


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mgpu-cli", description="Shares of NVIDIA GPUs on this node.")
    parser.add_argument("--version", action="version", version=f"mgpu-cli {__version__}")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"the agent's socket (MGPU_SOCKET, else {DEFAULT_SOCKET})",
    )
    parser.set_defaults(output="table")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_listings(commands)
    _add_changes(commands)
    return parser


def _add_listings(commands: Any) -> None:
    devices = commands.add_parser("device", help="the cards").add_subparsers(
        metavar="info", required=True
    )
    info = _listing(devices, "info", _device_info, "the cards and what is given out of them")
    info.add_argument("-a", "--all", action="store_true", help="every field")
    info.add_argument("device", nargs="?", help="one card, by index or UUID")
    containers = commands.add_parser("container", help="who holds instances").add_subparsers(
        metavar="info", required=True
    )
    info = _listing(containers, "info", _container_info, "who holds what and uses how much")
    info.add_argument("container", nargs="?", help="one, by id (or its beginning) or name")
    _listing(commands, "check", _check, "what this node can do and what is missing")
    _listing(commands, "status", _status, "the agent itself")
    top = _listing(commands, "top", _top, "usage, redrawn")
    top.add_argument("-1", "--once", action="store_true", help="one frame")
    top.add_argument("-d", "--interval", type=_seconds, default=1.0, metavar="S", help="seconds")


def _add_changes(commands: Any) -> None:
    bind = _listing(commands, "bind", _bind, "give a running container its instances")
    bind.add_argument("target", help="container id, PID, or path of a cgroup")
    _add_request(bind)
    run = commands.add_parser(
        "run",
        help="run a command with instances of its own",
        usage="mgpu-cli run OPTIONS -- COMMAND...",
    )
    run.set_defaults(command=_run)
    _add_request(run)
    change = _listing(commands, "set", _set, "change a container's share while it runs")
    change.add_argument("container", help="id (or its beginning) or name")
    _add_share(change, required=False)
    change.add_argument("--force", action="store_true", help="a limit below what is in use, too")
    release = _listing(commands, "release", _release, "take a container's instances away")
    release.add_argument("container", help="id (or its beginning) or name")
    release.add_argument("--force", action="store_true", help="also while it holds device memory")
    policy = _listing(commands, "policy", _policy, "show or set the compute_policy of a card")
    policy.add_argument("device", help="index or UUID")
    policy.add_argument(
        "policy",
        nargs="?",
        help="fixed-share (0), guaranteed-burst-share (1), native-burst-share (2)",
    )


def _listing(
    commands: Any, name: str, command: Callable[..., int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(command=command)
    return parser


def _add_request(parser: argparse.ArgumentParser) -> None:
    _add_share(parser, required=True)
    parser.add_argument("--cards", metavar="N", help="over so many cards; core, memory: totals")
    parser.add_argument("--device", metavar="X", help="on this card, by index or UUID")
    parser.add_argument("--name", help="a name to find it by")


def _add_share(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--core", metavar="PERCENT", required=required, help="1..99, or 100 a card")
    parser.add_argument("--memory", metavar="MIB", help="device memory; not with whole cards")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--online", action="store_true", default=None, help="latency matters")
    kind.add_argument("--offline", dest="online", action="store_false", help="best effort")
    parser.add_argument("--enforcer", choices=("native", "kill", "observe", "default"))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("0.1 to 3600")
    return value


def names_of_commands() -> List[str]:
    """Every command, for the test that holds docs/cli.md and this file together."""
    found = []
    for action in _parser()._subparsers._group_actions:  # type: ignore[union-attr]
        found += list(action.choices or ())
    return found


if __name__ == "__main__":
    sys.exit(main())
