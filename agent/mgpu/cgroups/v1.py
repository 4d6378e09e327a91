"""The devices controller of cgroup v1: its rules, as devices.list shows them.

A cgroup allows all but its exceptions, or denies all but its exceptions. The kernel lists the
exceptions of the second kind only: of the first it shows "a *:* rwm" whatever is denied (5.4 to
6.18, security/device_cgroup.c). Exceptions match by exact numbers: denying 195:1 takes nothing
from an allowed 195:*.
"""

import errno
from typing import List, NamedTuple, Optional, Set, Tuple

from mgpu.cgroups.tree import Tree

ANY = None


class Rule(NamedTuple):
    """One line of devices.list; ``major`` and ``minor`` are None for ``*``."""

    kind: str
    major: Optional[int]
    minor: Optional[int]
    access: str

    def __str__(self) -> str:
        return f"{self.kind} {_number(self.major)}:{_number(self.minor)} {self.access}"

    @property
    def opens(self) -> bool:
        """Whether it lets somebody open a node; ``m`` alone only makes one."""
        return "r" in self.access or "w" in self.access


def _number(number: Optional[int]) -> str:
    return "*" if number is None else str(number)


def parse_rules(text: str) -> List[Rule]:
    """The lines of devices.list."""
    rules = []
    for line in text.splitlines():
        kind, numbers, access = line.split()
        major, minor = (None if n == "*" else int(n) for n in numbers.split(":"))
        rules.append(Rule(kind, major, minor, access))
    return rules


class DeviceRules(Tree):
    """The hierarchy that has the devices controller."""

    def rules(self, path: str) -> List[Rule]:
        return parse_rules((self.directory(path) / "devices.list").read_text())

    def allow(self, path: str, rule: Rule) -> None:
        """Raises PermissionError when the parent does not allow it."""
        (self.directory(path) / "devices.allow").write_text(str(rule))

    def deny(self, path: str, rule: Rule) -> None:
        """Deny in the cgroup and, as the kernel does it, in those below."""
        (self.directory(path) / "devices.deny").write_text(str(rule))


def allows_all(rules: List[Rule]) -> bool:
    """Whether the cgroup allows all but its (unlisted) exceptions."""
    return any(rule.kind == "a" for rule in rules)


Number = Tuple[int, int]


def close_open(
    tree: DeviceRules, path: str, held: Set[Number], closed: Set[Number], majors: Set[int]
) -> None:
    """Make exactly ``held`` of NVIDIA's numbers open to the cgroup and those below it.

    ``closed`` are the other numbers one by one, ``majors`` all of NVIDIA's. Raises PermissionError
    when a cgroup above denies what is held, OSError EINVAL when a rule for all devices allows them.
    """
    for each in tree.walk(path):
        try:
            rules = tree.rules(each)
            if allows_all(rules):
                _narrow(tree, each, held, closed)
            else:
                _settle(tree, each, rules, held, majors)
        except OSError as error:
            if each == path or error.errno not in (errno.ENOENT, errno.ENODEV):
                raise


def _narrow(tree: DeviceRules, path: str, held: Set[Number], closed: Set[Number]) -> None:
    """For a cgroup that allows all. The kernel shows no exceptions: each is written every time."""
    for major, minor in sorted(held):
        tree.allow(path, Rule("c", major, minor, "rwm"))
    for major, minor in sorted(closed):
        tree.deny(path, Rule("c", major, minor, "rwm"))


def _settle(
    tree: DeviceRules, path: str, rules: List[Rule], held: Set[Number], majors: Set[int]
) -> None:
    """For a cgroup that denies all. What is held is allowed before wider rules go: no gap."""
    allowed = {(r.major, r.minor) for r in rules if r.kind == "c" and set("rw") <= set(r.access)}
    for number in sorted(held - allowed):
        tree.allow(path, Rule("c", *number, "rw"))
    for rule in rules:
        if rule.kind != "c" or not rule.opens or (rule.major, rule.minor) in held:
            continue
        if rule.major is ANY:
            raise OSError(errno.EINVAL, f"the rule {rule} allows every device")
        if rule.major in majors:
            tree.deny(path, rule)


def is_closed(tree: DeviceRules, path: str, held: Set[Number], majors: Set[int]) -> Optional[bool]:
    """Whether exactly ``held`` is open; None: it allows all, and its exceptions are hidden."""
    rules = tree.rules(path)
    if allows_all(rules):
        return None
    opening = {(r.major, r.minor) for r in rules if r.kind == "c" and r.opens}
    return held <= opening and not any(
        major is ANY or major in majors for major, minor in opening - set(held)
    )


def reopen(tree: DeviceRules, path: str, numbers: Set[Number]) -> None:
    """Undo ``close_open``, given all of NVIDIA's numbers.

    A cgroup that allows all may open them again; one that denies all loses those that it had.
    """
    for each in tree.walk(path):
        try:
            rules = tree.rules(each)
            if allows_all(rules):
                for number in sorted(numbers):
                    tree.allow(each, Rule("c", *number, "rwm"))
            for rule in rules:
                if rule.kind == "c" and (rule.major, rule.minor) in numbers:
                    tree.deny(each, rule)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
