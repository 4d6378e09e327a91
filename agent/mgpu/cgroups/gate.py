"""Who may open NVIDIA's device nodes: the gate on a container's cgroup.

In the unified hierarchy it is a BPF program beside whatever programs other managers attach; all
of them and those of the cgroups above must agree, so ours can only take away. Its decision lies in
maps that others write. In the v1 hierarchy it is the devices controller's rules.

Everything is idempotent and read from the kernel: nothing is kept over a restart.
"""

import errno
import fnmatch
import os
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set

from mgpu import bpf, log
from mgpu.cgroups import Cgroups, v1
from mgpu.cgroups.v2 import Unified, programs_of
from mgpu.errors import Conflict, NotCapable, NotFound
from mgpu.model import Cgroup
from mgpu.nodes import Numbers

# How our program is known among others on a cgroup, also one of an earlier version.
NAME_PREFIX = "mgpu_"
# nvlimits.h: the driver serves at most 32 cards (NV_MAX_DEVICES); 254 is modeset's minor.
_CLOSED_MINORS = (*range(32), 254)
_UVM_TOOLS_MINOR = 1


class _Plan(NamedTuple):
    """What of NVIDIA's numbers a v1 cgroup is to open and what not."""

    held: Set[v1.Number]
    closed: Set[v1.Number]
    majors: Set[int]


def plan_of(numbers: Numbers, minors: Sequence[int]) -> _Plan:
    """``minors`` are the cards held; with any of them go nvidiactl and nvidia-uvm."""
    ctl = (numbers.card_major, numbers.ctl_minor)
    uvm = (numbers.uvm_major, numbers.uvm_minor)
    common = {n for n in (ctl, uvm) if n[0] >= 0}
    held = {(numbers.card_major, minor) for minor in minors} | (common if minors else set())
    every = {(numbers.card_major, minor) for minor in _CLOSED_MINORS} | common
    if numbers.uvm_major >= 0 and not numbers.simulated:
        every.add((numbers.uvm_major, _UVM_TOOLS_MINOR))
    majors = {n for n in (numbers.card_major, numbers.uvm_major, *numbers.others) if n >= 0}
    return _Plan(held, every - held, majors)


class Gate:
    """The gates of this node. ``program`` gives the loaded program's descriptor, and keeps it."""

    def __init__(self, cgroups: Cgroups, program: Callable[[], int]) -> None:
        self._cgroups = cgroups
        self._program = program
        self._plans: Dict[int, _Plan] = {}
        self._held_paths: Dict[int, str] = {}
        self._guarded: Set[str] = set()
        self._unguardable: Set[str] = set()
        self._last: Optional[Numbers] = None

    def close(self, cgroup: Cgroup, numbers: Numbers, minors: Sequence[int]) -> None:
        """Let the cgroup and those below it open the cards with ``minors``, and no other.

        Raises NotFound when it is gone, Conflict when another manager's program is there
        exclusively, NotCapable when a v1 rule above or beside forbids it, OSError as the kernel
        does.
        """
        if not self._cgroups.exists(cgroup):
            raise NotFound(f"cgroup {cgroup.path}", "it is gone", "release the container")
        plan = plan_of(numbers, minors)
        self._last = numbers
        if self._plans.get(cgroup.inode) == plan and self.is_closed(cgroup):
            return
        if cgroup.unified is not None and self._cgroups.unified is not None:
            self._attach(self._cgroups.unified, cgroup.unified)
            self._held_paths[cgroup.inode] = cgroup.unified
        if cgroup.devices is not None and self._cgroups.devices is not None:
            self._apply_rules(self._cgroups.devices, cgroup.devices, plan)
        self._plans[cgroup.inode] = plan

    def is_closed(self, cgroup: Cgroup) -> bool:
        """Whether ``close`` would change nothing.

        A v1 cgroup that allows all does not show its exceptions: there the answer is whether this
        agent closed it.
        """
        if cgroup.unified is not None and self._cgroups.unified is not None:
            ours = _ours(self._cgroups.attached(cgroup))
            if ours != [bpf.program_info(self._program()).program_id]:
                return False
        if not self._cgroups.exists(cgroup):
            return False
        if cgroup.devices is None or self._cgroups.devices is None:
            return True
        plan = self._plans.get(cgroup.inode)
        if plan is None:
            # Nothing says what it holds, but for the program that already guards it.
            return cgroup.unified is not None
        try:
            seen = v1.is_closed(self._cgroups.devices, cgroup.devices, plan.held, plan.majors)
        except FileNotFoundError:
            return False
        return seen is not False

    def open(self, cgroup: Cgroup, numbers: Optional[Numbers] = None) -> None:
        """Take away what ``close`` put there, also in an earlier run of the agent.

        A guard over the cgroup stays. ``numbers`` are those of the last ``close`` where not given.
        """
        numbers = numbers or self._last
        plan = self._plans.pop(cgroup.inode, None)
        self._held_paths.pop(cgroup.inode, None)
        if not self._cgroups.exists(cgroup):
            return
        if cgroup.unified is not None and cgroup.unified not in self._guarded:
            self.detach(cgroup.unified)
        if cgroup.devices is not None and self._cgroups.devices is not None:
            if plan is None and numbers is not None:
                plan = plan_of(numbers, [])
            if plan is not None:
                every = plan.held | plan.closed
                v1.reopen(self._cgroups.devices, cgroup.devices, every)

    def guard(self, globs: Sequence[str]) -> List[str]:
        """Close what matches to every cgroup without an instance, also before it is bound.

        ``globs`` are relative to the unified hierarchy; ``*`` does not match ``/``. What a former
        call guarded and these do not match is opened. Returns what is guarded now. Does nothing
        without a unified hierarchy: the v1 controller cannot close a cgroup and open one in it.
        What another manager's program keeps from being guarded is logged, once.
        """
        tree = self._cgroups.unified
        if tree is None:
            return []
        wanted = {path for glob in globs for path in _matching(tree, glob)}
        for path in sorted(wanted):
            try:
                self._attach(tree, path)
                self._unguardable.discard(path)
            except FileNotFoundError:
                continue
            except Conflict as error:
                self._warn_once(path, error)
        self._unguard(self._guarded - wanted)
        self._guarded = wanted
        return sorted(wanted)

    def _warn_once(self, path: str, error: Conflict) -> None:
        if path not in self._unguardable:
            self._unguardable.add(path)
            log.warning("guard-lacks", cgroup=path, why=error)

    def guarded(self) -> List[str]:
        """The paths that ``guard`` closed."""
        return sorted(self._guarded)

    def unguard(self) -> None:
        """Take away what ``guard`` put there; gates of containers stay."""
        self._unguard(self._guarded)
        self._guarded = set()

    def everywhere(self) -> List[str]:
        """The paths in the unified hierarchy that carry a program of ours."""
        tree = self._cgroups.unified
        if tree is None:
            return []
        found = []
        for path in tree.walk("/"):
            try:
                if _ours(tree.attached(path)):
                    found.append(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        return found

    def detach(self, path: str) -> None:
        """Take our programs from the cgroup at ``path`` of the unified hierarchy, if any."""
        tree = self._cgroups.unified
        if tree is None:
            return
        try:
            with tree.opened(path) as fd:
                for program_id in _ours(programs_of(fd)):
                    _detach_id(fd, program_id)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def _unguard(self, paths: Set[str]) -> None:
        for path in sorted(paths - set(self._held_paths.values())):
            self.detach(path)

    def _attach(self, tree: Unified, path: str) -> None:
        program_fd = self._program()
        wanted = bpf.program_info(program_fd).program_id
        with tree.opened(path) as fd:
            ours = _ours(programs_of(fd))
            others = [program_id for program_id in ours if program_id != wanted]
            if wanted not in ours:
                above = tree.overridden_by_ours(path)
                if above is not None:
                    raise _overriding(tree, path, above)
                try:
                    if others and _replace(fd, program_fd, others[0]):
                        others = others[1:]
                    else:
                        _attach_beside(fd, program_fd)
                except PermissionError:
                    raise self._exclusive(tree, path) from None
            for program_id in others:
                _detach_id(fd, program_id)

    def _exclusive(self, tree: Unified, path: str) -> Conflict:
        """Who is in the way: a program attached without BPF_F_ALLOW_MULTI, here or above."""
        where, holder = path, ""
        while True:
            foreign = [p for p in tree.attached(where) if not p.name.startswith(NAME_PREFIX)]
            if foreign:
                holder = f"program {foreign[0].program_id} ({foreign[0].name or 'no name'})"
                break
            if where == "/":
                break
            where = where.rpartition("/")[0] or "/"
        reason = (
            f"{holder} is attached to {where} exclusively: the kernel lets none be beside it"
            if holder
            else "the kernel does not let a device program be attached there"
        )
        remedy = "let its owner attach it with BPF_F_ALLOW_MULTI, or detach it"
        return Conflict(f"cgroup {path}", reason, remedy)

    def _apply_rules(self, tree: v1.DeviceRules, path: str, plan: _Plan) -> None:
        asked = f"cgroup {path}"
        try:
            v1.close_open(tree, path, plan.held, plan.closed, plan.majors)
        except PermissionError:
            reason = "a devices cgroup above it denies the cards"
            remedy = "allow them there (devices.allow), or move it"
            raise NotCapable(asked, reason, remedy) from None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            remedy = "start the container with rules for the devices that it needs"
            raise NotCapable(asked, str(error.strerror), remedy) from None


def _overriding(tree: Unified, path: str, above: str) -> Conflict:
    program = tree.attached(above)[0]
    return Conflict(
        f"cgroup {path}",
        f"program {program.program_id} ({program.name or 'no name'}) on {above} is attached with "
        "BPF_F_ALLOW_OVERRIDE: the kernel would ask it no more once ours is there",
        "let its owner attach it with BPF_F_ALLOW_MULTI",
    )


def _ours(programs: Sequence[bpf.ProgramInfo]) -> List[int]:
    return [p.program_id for p in programs if p.name.startswith(NAME_PREFIX)]


def _attach_beside(cgroup_fd: int, program_fd: int) -> None:
    bpf.prog_attach(cgroup_fd, program_fd, bpf.ATTACH_CGROUP_DEVICE, bpf.F_ALLOW_MULTI)


def _replace(cgroup_fd: int, program_fd: int, old_id: int) -> bool:
    """Put the program in the place of an older one at once; False where that cannot be done.

    Kernels before 5.6 answer EINVAL: there the new one is attached before the old one is detached.
    """
    try:
        old_fd = bpf.prog_by_id(old_id)
    except FileNotFoundError:
        return False
    try:
        flags = bpf.F_ALLOW_MULTI | bpf.F_REPLACE
        bpf.prog_attach(cgroup_fd, program_fd, bpf.ATTACH_CGROUP_DEVICE, flags, old_fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return False
        raise
    finally:
        os.close(old_fd)
    return True


def _detach_id(cgroup_fd: int, program_id: int) -> None:
    try:
        program_fd = bpf.prog_by_id(program_id)
    except FileNotFoundError:
        return
    try:
        bpf.prog_detach(cgroup_fd, program_fd, bpf.ATTACH_CGROUP_DEVICE)
    except FileNotFoundError:
        return
    finally:
        os.close(program_fd)


def _matching(tree: Unified, glob: str) -> List[str]:
    """Cgroups whose path matches, part by part."""
    found = [""]
    for part in glob.strip("/").split("/"):
        found = [
            f"{path}/{name}"
            for path in found
            for name in tree.children(path or "/")
            if fnmatch.fnmatchcase(name, part)
        ]
    return found
