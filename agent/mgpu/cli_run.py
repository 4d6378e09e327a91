"""``mgpu-cli run``: a command in a cgroup of its own with instances of its own.

The child is forked first and waits on a pipe; the agent moves it into the new cgroup; then it
executes the command, which so never runs outside its limits. When the command ends, what it left
running is killed and the instances are released. Whoever kills this process instead leaves the
command running within its limits: the agent releases them once its cgroup is empty.
"""

import os
import signal
import sys
from typing import Callable, Dict, Mapping, NoReturn, Optional, Sequence

from mgpu.client import Client
from mgpu.errors import MgpuError

CANNOT_EXECUTE = 126
NOT_FOUND = 127
GAVE_UP = 125
SI_KERNEL = 0x80
FORWARDED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# What Python ignores for itself would be ignored in the command, too.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def run(
    client: Client,
    request: Mapping[str, object],
    command: Sequence[str],
    complain: Callable[[str], None],
) -> int:
    """The exit status of ``command``, 128+N when signal N ended it. Raises MgpuError before it."""
    sys.stdout.flush()
    sys.stderr.flush()
    gate_read, gate_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_write)
        _child(gate_read, command)
    os.close(gate_read)
    try:
        answer = client.start_run({**request, "pid": child})
    except BaseException:
        os.close(gate_write)
        os.waitpid(child, 0)
        raise
    for warning in answer["warnings"]:
        complain(f"warning: {warning}")
    # From here on the command decides what a signal means.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})
    os.write(gate_write, b"g")
    os.close(gate_write)
    status = _wait(child)
    _release(client, answer["id"], complain)
    return status


def _child(gate: int, command: Sequence[str]) -> NoReturn:
    code = GAVE_UP
    try:
        if os.read(gate, 1) == b"g":
            os.close(gate)
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(command[0], list(command))
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
        os.write(2, f"mgpu-cli: {command[0]}: {error.strerror}\n".encode(errors="replace"))
    except BaseException:
        code = GAVE_UP
    os._exit(code)


def _wait(child: int) -> int:
    """Until the child ends: hand signals on and stop and go on with it, as a shell expects."""
    while True:
        status = _ended(child)
        if status is not None:
            return status
        received = signal.sigwaitinfo({signal.SIGCHLD, *FORWARDED})
        if received.si_signo in FORWARDED and received.si_code != SI_KERNEL:
            # What the terminal sends (SI_KERNEL) has reached the child, which is in our group.
            _send(child, received.si_signo)


def _ended(child: int) -> Optional[int]:
    pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
    if pid == 0:
        return None
    if os.WIFSTOPPED(status):
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(child, signal.SIGCONT)
        return None
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return


def _release(client: Client, run_id: str, complain: Callable[[str], None]) -> None:
    try:
        answer: Dict[str, object] = client.release(run_id, force=True)
    except MgpuError as error:
        if error.code != "not-found":
            complain(f"warning: {error}")
        return
    for warning in answer["warnings"]:  # type: ignore[attr-defined]
        complain(f"warning: {warning}")
