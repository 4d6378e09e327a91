"""Every error mgpu shows to a person: what was asked, what stood in the way, what to do.

The exit codes and the ``code`` words are part of the interface (docs/cli.md) and never change
their meaning.
"""

from typing import Dict


class MgpuError(Exception):
    """Base of all errors that are somebody's to read.

    ``asked`` names the input, ``reason`` the rule or the obstacle, ``remedy`` what would do.
    """

    code = "error"
    exit_code = 1
    http_status = 500

    def __init__(self, asked: str, reason: str, remedy: str) -> None:
        super().__init__(asked, reason, remedy)
        self.asked = asked
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(f"{self.asked}: {self.reason}; {self.remedy}".split())

    def as_json(self) -> Dict[str, object]:
        """The body of an error answer of the API."""
        return {
            "error": {
                "code": self.code,
                "exit_code": self.exit_code,
                "asked": self.asked,
                "reason": self.reason,
                "remedy": self.remedy,
                "message": str(self),
            }
        }


class BadInput(MgpuError):
    """The input cannot be read as what it should be (type, form, size)."""

    code = "bad-input"
    exit_code = 2
    http_status = 400


class RuleBroken(MgpuError):
    """The request is well formed but breaks a rule of rules.py."""

    code = "rule-broken"
    exit_code = 3
    http_status = 422


class NotFound(MgpuError):
    """Unknown device, container, PID or cgroup."""

    code = "not-found"
    exit_code = 4
    http_status = 404


class Conflict(MgpuError):
    """The thing exists already or is in a state that forbids the request."""

    code = "conflict"
    exit_code = 5
    http_status = 409


class NoRoom(MgpuError):
    """No card holds the request."""

    code = "no-room"
    exit_code = 6
    http_status = 409


class NotCapable(MgpuError):
    """This node lacks what the request needs (kernel, rights, driver, headers)."""

    code = "not-capable"
    exit_code = 7
    http_status = 501


class AgentUnreachable(MgpuError):
    """The client cannot talk to the agent."""

    code = "agent-unreachable"
    exit_code = 8
    http_status = 503


class StateUnusable(MgpuError):
    """The ledger cannot be read or written; nothing was changed."""

    code = "state-unusable"
    exit_code = 9
    http_status = 503


class ConfigInvalid(MgpuError):
    """agent.conf cannot be used."""

    code = "config-invalid"
    exit_code = 10
    http_status = 500


class AlreadyRunning(MgpuError):
    """Another agent holds this node."""

    code = "already-running"
    exit_code = 11
    http_status = 409


class NotPermitted(MgpuError):
    """The caller lacks the right."""

    code = "not-permitted"
    exit_code = 12
    http_status = 403


BY_CODE = {
    cls.code: cls
    for cls in (
        BadInput,
        RuleBroken,
        NotFound,
        Conflict,
        NoRoom,
        NotCapable,
        AgentUnreachable,
        StateUnusable,
        ConfigInvalid,
        AlreadyRunning,
        NotPermitted,
    )
}


def from_json(body: Dict[str, Dict[str, str]]) -> MgpuError:
    """The error that ``as_json`` was made of, on the client's side."""
    error = body["error"]
    cls = BY_CODE.get(error["code"], MgpuError)
    return cls(error["asked"], error["reason"], error["remedy"])
