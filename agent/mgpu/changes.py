"""Changes of the ledger that the kernel follows, or that are taken back.

A change is committed first, then ``apply`` makes the kernel agree, and only then is it answered.
Where the kernel cannot be made to agree, the ledger's entry is taken back. What is taken away is
gone from the ledger at once; where the kernel lags, the agent goes on trying.
"""

import time
from typing import Callable, List, Optional

from mgpu import log
from mgpu.errors import Conflict, MgpuError, NoRoom, NotFound
from mgpu.figures import Figures
from mgpu.model import Cgroup, Container, Request
from mgpu.placement import choose
from mgpu.ports import Parts

RUN_ORIGIN = "run"
END_TIMEOUT_S = 5.0


class Changes:
    """Callers see to it that there is one change at a time."""

    def __init__(self, figures: Figures, parts: Parts) -> None:
        self._figures = figures
        self._ledger = figures.ledger
        self._parts = parts

    def add(self, draft: Container, request: Request) -> Container:
        """Place and commit, then apply; what vanished containers still hold is used for it.

        Raises Conflict, NoRoom or RuleBroken, or what the kernel said.
        """
        try:
            container = self._commit(draft, request)
        except (NoRoom, Conflict):
            if not self.release_vanished():
                raise
            container = self._commit(draft, request)
        self.apply_or(container.container_id, lambda: self._ledger.remove(draft.container_id))
        return container

    def _commit(self, draft: Container, request: Request) -> Container:
        strategy = self._figures.config().card_placement
        # Before the transaction: a driver that hangs must not keep the ledger from its readers.
        cards = self._figures.devices.cards()
        with self._ledger.transaction():
            self._check_not_nested(draft)
            placements = choose(request, self._figures.loads_of(cards), strategy)
            return self._ledger.add(draft, placements)

    def _check_not_nested(self, draft: Container) -> None:
        """A cgroup inside a bound one would leave that one's limit, so it cannot be bound."""
        path = draft.cgroup.path
        for other in self._ledger.containers():
            theirs = other.cgroup.path
            inside = path.startswith(theirs + "/") or theirs.startswith(path + "/")
            if inside and other.cgroup.hierarchy == draft.cgroup.hierarchy:
                raise Conflict(
                    f"cgroup {path}",
                    f"container {other.short_id} is bound to {theirs}, and one holds the other",
                    f"'mgpu-cli release {other.short_id}' first",
                )

    def apply_or(self, container_id: str, undo: Callable[[], object]) -> None:
        """Make the kernel agree; where that fails take the change back and tell why."""
        try:
            self._parts.apply(container_id)
        except Exception as error:
            self._undo(container_id, undo, error)
            self.settle(container_id)
            if isinstance(error, MgpuError):
                raise
            asked, reason = f"container {container_id[:12]}", f"the kernel refused it ({error})"
            remedy = "see the agent's journal; nothing was changed"
            raise MgpuError(asked, reason, remedy) from error

    def _undo(self, container_id: str, undo: Callable[[], object], cause: Exception) -> None:
        try:
            undo()
        except MgpuError as error:
            reason = f"the kernel refused it ({cause}), and it cannot be taken back ({error})"
            remedy = "mend that and release the container; until then the agent goes on trying"
            raise MgpuError(f"container {container_id[:12]}", reason, remedy) from error

    def settle(self, container_id: Optional[str]) -> List[str]:
        """Bring the kernel to the ledger as far as it goes now. Returns warnings."""
        try:
            self._parts.apply(container_id)
        except Exception as error:
            log.warning("kernel-lags", container=container_id or "", why=error)
            return [f"the kernel does not agree yet ({error}); the agent goes on trying"]
        return []

    def move_in(self, container: Container, pid: int) -> None:
        """Move a process into the container's cgroup, or take the container back."""
        try:
            self._parts.groups.add(container.cgroup, pid)
        except Exception as error:
            self._ledger.remove(container.container_id)
            self.settle(container.container_id)
            if isinstance(error, MgpuError):
                raise
            reason = f"it cannot be moved into cgroup {container.cgroup.path} ({error})"
            raise MgpuError(f"PID {pid}", reason, "try again") from error

    def forget(self, container: Container) -> List[str]:
        """Out of the ledger, then out of the kernel. Returns warnings."""
        try:
            self._ledger.remove(container.container_id, container.cgroup)
        except NotFound:
            return []
        warnings = self.settle(container.container_id)
        if container.origin == RUN_ORIGIN:
            self.remove_cgroup(container.cgroup)
        return warnings

    def release_vanished(self) -> List[str]:
        """Forget the containers whose cgroup is gone, and runs that ended. Returns their ids."""
        gone = [c for c in self._ledger.containers() if self._has_vanished(c)]
        for container in gone:
            log.event("container-vanished", container=container.short_id, called=container.name)
            self.forget(container)
        return [container.container_id for container in gone]

    def _has_vanished(self, container: Container) -> bool:
        """A run is made and filled in one change, so an empty one has ended."""
        groups = self._parts.groups
        if not groups.exists(container.cgroup):
            return True
        return container.origin == RUN_ORIGIN and not groups.members(container.cgroup)

    def end_processes(self, container: Container) -> None:
        """Kill what a run left behind; forking cannot outrun it, as it is repeated."""
        deadline = time.monotonic() + END_TIMEOUT_S
        groups = self._parts.groups
        while groups.exists(container.cgroup):
            members = groups.members(container.cgroup)
            if not members:
                return
            self._parts.processes.kill(members)
            if time.monotonic() > deadline:
                reason = f"{len(members)} of its processes do not die"
                remedy = "they may be stuck in the driver; try again"
                raise Conflict(f"container {container.short_id}", reason, remedy)
            time.sleep(0.01)

    def remove_cgroup(self, cgroup: Cgroup) -> None:
        """Take a run's cgroup away; one that stays is logged."""
        try:
            if self._parts.groups.exists(cgroup):
                self._parts.groups.remove(cgroup)
        except (OSError, MgpuError) as error:
            log.warning("cgroup-stays", cgroup=cgroup.path, why=error)
