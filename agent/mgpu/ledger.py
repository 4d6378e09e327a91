"""The ledger: who holds what, in SQLite. The one source of truth; nothing else is remembered.

Owns the tables of state.db; statefile.py owns the file itself, its locks and faults. Never touches
the kernel's side: reconcile does.
"""

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from mgpu.errors import Conflict, NotFound
from mgpu.model import Cgroup, Container, Enforcer, Instance, Policy
from mgpu.placement import Placement
from mgpu.statefile import Schema, StateFile, damaged, ordered
from mgpu.units import shown

SHORTEST_ID_PREFIX = 4

SCHEMA = Schema(
    application_id=0x6D475055,  # "mGPU"
    version=1,
    statements=(
        """CREATE TABLE container (
        container_id TEXT PRIMARY KEY,
        boot_id TEXT NOT NULL,
        hierarchy TEXT NOT NULL CHECK (hierarchy IN ('unified', 'devices')),
        inode INTEGER NOT NULL,
        unified TEXT,
        devices TEXT,
        freezer TEXT,
        online INTEGER NOT NULL CHECK (online IN (0, 1)),
        enforcer TEXT,
        pod_uid TEXT NOT NULL,
        name TEXT NOT NULL,
        origin TEXT NOT NULL,
        created_at_s REAL NOT NULL,
        UNIQUE (boot_id, hierarchy, inode)
    )""",
        """CREATE TABLE instance (
        share_id INTEGER PRIMARY KEY AUTOINCREMENT,
        container_id TEXT NOT NULL REFERENCES container ON DELETE CASCADE,
        device_uuid TEXT NOT NULL,
        device_index INTEGER NOT NULL,
        instance_id INTEGER NOT NULL CHECK (instance_id BETWEEN 0 AND 15),
        compute_weight INTEGER NOT NULL CHECK (compute_weight BETWEEN 1 AND 100),
        vmem_limit_bytes INTEGER NOT NULL CHECK (vmem_limit_bytes > 0),
        whole_card INTEGER NOT NULL CHECK (whole_card IN (0, 1)),
        UNIQUE (device_uuid, instance_id),
        UNIQUE (container_id, device_uuid)
    )""",
        """CREATE TABLE policy (
        device_uuid TEXT PRIMARY KEY,
        policy INTEGER NOT NULL CHECK (policy BETWEEN 0 AND 2)
    )""",
        "CREATE TABLE fact (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    ),
)

_CONTAINER = (
    "container_id",
    "boot_id",
    "hierarchy",
    "inode",
    "unified",
    "devices",
    "freezer",
    "online",
    "enforcer",
    "pod_uid",
    "name",
    "origin",
    "created_at_s",
)
_INSTANCE = (
    "container_id",
    "device_uuid",
    "device_index",
    "instance_id",
    "compute_weight",
    "vmem_limit_bytes",
    "whole_card",
)
_JOINED = f"""SELECT {", ".join("c." + name for name in _CONTAINER)}, share_id,
    {", ".join("i." + name for name in _INSTANCE)}
    FROM container c JOIN instance i ON i.container_id = c.container_id
    {{where}} ORDER BY created_at_s, c.container_id, device_index, share_id"""


def read_boot_id(proc_root: Path) -> str:
    """The kernel's name for this boot: inode numbers of cgroups mean nothing in another."""
    return (proc_root / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Ledger:
    """The containers and their instances, the devices' policies, and a few remembered facts.

    Every method raises StateUnusable when the file cannot serve; then nothing was changed, and the
    next call tries again with a new connection. Returned values are snapshots.
    """

    def __init__(self, path: Path, boot_id: str) -> None:
        """Opens or creates ``path``. Cgroups recorded from now on belong to ``boot_id``."""
        self._file = StateFile(path, SCHEMA)
        self._boot_id = boot_id
        self._last: Tuple[object, Tuple[Container, ...]] = (None, ())

    def close(self) -> None:
        """Closes the file; a later use opens it again."""
        self._file.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything inside happens or nothing does, and no other thread or process writes.

        May be nested: an inner one that fails takes back its own part only. Other threads wait for
        it even to read: do nothing slow inside, and take no lock whose holder may use the ledger.
        """
        with self._file.transaction():
            yield

    def containers(self) -> List[Container]:
        """All containers, oldest first, their instances by device index."""
        state = self._file.state()
        last, containers = self._last
        if state is None or state != last:
            containers = tuple(self._select(""))
            self._last = (state, containers)
        return list(containers)

    def get(self, container_id: str) -> Container:
        """The container of exactly this id. Raises NotFound."""
        found = self._select("WHERE c.container_id = ?", container_id)
        if not found:
            raise _no_container(container_id)
        return found[0]

    def find(self, text: str) -> Container:
        """The container that a person means: its id, cgroup path, name, or its id's beginning.

        Raises NotFound, or Conflict when several fit.
        """
        everyone = self.containers()
        for fits in (
            [c for c in everyone if c.container_id == text],
            [c for c in everyone if _at_path(c, text)],
            [c for c in everyone if text and c.name == text],
            [c for c in everyone if len(text) >= SHORTEST_ID_PREFIX and _begins(c, text)],
        ):
            if len(fits) == 1:
                return fits[0]
            if fits:
                ids = ", ".join(c.container_id[: len(text) + 8] for c in fits[:4])
                raise Conflict(
                    f"container {shown(text)}",
                    f"{len(fits)} containers fit: {ids}",
                    "give the id, or more of it",
                )
        raise _no_container(text)

    def of_cgroup(self, cgroup: Cgroup) -> Optional[Container]:
        """The container bound to this very cgroup (hierarchy and inode, in this boot), if any."""
        found = self._select(
            "WHERE c.boot_id = ? AND c.hierarchy = ? AND c.inode = ?",
            self._boot_id,
            cgroup.hierarchy,
            cgroup.inode,
        )
        return found[0] if found else None

    def add(self, draft: Container, placements: Sequence[Placement]) -> Container:
        """Records ``draft`` with one new instance for each placement (its own are ignored).

        Raises Conflict when the container, its cgroup, or an instance number is taken.
        """
        if not placements:
            raise ValueError("a container holds at least one instance")
        with self.transaction():
            self._check_unbound(draft)
            self._insert_container(draft)
            for placement in placements:
                self._insert_instance(draft.container_id, placement)
            return self.get(draft.container_id)

    def update(self, container: Container) -> Container:
        """Writes ``container`` over the recorded one of its id: all but which cards it holds.

        Weights, limits, device indexes, online, enforcer, cgroup, names. Raises NotFound when it,
        or one of its share_ids, is not there any more, and Conflict when the cgroup is another's.
        """
        with self.transaction():
            recorded = self.get(container.container_id)
            shares = [instance.share_id for instance in recorded.instances]
            if sorted(instance.share_id for instance in container.instances) != sorted(shares):
                raise _no_container(container.container_id)
            self._check_cgroup_free(container)
            self._update_container(container)
            for instance in container.instances:
                self._update_instance(instance)
            return self.get(container.container_id)

    def remove(self, container_id: str, cgroup: Optional[Cgroup] = None) -> Container:
        """Forgets the container and returns what it held. Raises NotFound.

        With ``cgroup`` only as long as it is still bound to that one: who saw a cgroup vanish must
        not remove a container of the same id that was bound anew since.
        """
        with self.transaction():
            recorded = self.get(container_id)
            if cgroup is not None and not _same_cgroup(recorded.cgroup, cgroup):
                raise _no_container(container_id)
            self._file.write("DELETE FROM container WHERE container_id = ?", container_id)
            return recorded

    def forget_other_boots(self) -> List[Container]:
        """Removes and returns the containers of earlier boots: their cgroups died with them."""
        with self.transaction():
            forgotten = self._select("WHERE c.boot_id <> ?", self._boot_id)
            self._file.write("DELETE FROM container WHERE boot_id <> ?", self._boot_id)
            return forgotten

    def policies(self) -> Dict[str, Policy]:
        """The policy of each device that was ever given one, by UUID."""
        rows = self._file.read("SELECT device_uuid, policy FROM policy")
        with self._sense():
            return {uuid: Policy(number) for uuid, number in rows}

    def set_policy(self, device_uuid: str, policy: Policy) -> None:
        with self.transaction():
            self._file.write(
                "INSERT OR REPLACE INTO policy VALUES (?, ?)", device_uuid, int(policy)
            )

    def facts(self) -> Dict[str, str]:
        """Small things to remember over restarts, such as a device number once chosen."""
        return dict(self._file.read("SELECT key, value FROM fact"))

    def set_fact(self, key: str, value: str) -> None:
        with self.transaction():
            self._file.write("INSERT OR REPLACE INTO fact VALUES (?, ?)", key, value)

    def _select(self, where: str, *values: object) -> List[Container]:
        rows = self._file.read(_JOINED.format(where=where), *values)
        with self._sense():
            return _containers(rows)

    @contextmanager
    def _sense(self) -> Iterator[None]:
        """A value that no agent writes: quick_check does not look into the cells."""
        try:
            yield
        except (ValueError, TypeError) as error:
            raise damaged(self._file.path, str(error)) from error

    def _check_unbound(self, draft: Container) -> None:
        known = self._file.read(
            "SELECT 1 FROM container WHERE container_id = ?", draft.container_id
        )
        if known:
            raise Conflict(
                f"container {draft.short_id}",
                "it holds instances already",
                f"change them with 'mgpu-cli set', or 'mgpu-cli release {draft.short_id}' first",
            )
        self._check_cgroup_free(draft)

    def _check_cgroup_free(self, container: Container) -> None:
        other = self.of_cgroup(container.cgroup)
        if other is not None and other.container_id != container.container_id:
            raise Conflict(
                f"cgroup {container.cgroup.path}",
                f"it is bound already, as container {other.short_id}",
                f"'mgpu-cli release {other.short_id}' first",
            )

    def _insert_container(self, draft: Container) -> None:
        self._file.write(
            f"INSERT INTO container {ordered(_CONTAINER)}",
            draft.container_id,
            self._boot_id,
            *_cgroup_columns(draft.cgroup),
            int(draft.online),
            draft.enforcer.value if draft.enforcer else None,
            draft.pod_uid,
            draft.name,
            draft.origin,
            draft.created_at_s,
        )

    def _insert_instance(self, container_id: str, placement: Placement) -> None:
        try:
            self._file.write(
                f"INSERT INTO instance {ordered(_INSTANCE)}",
                container_id,
                placement.device_uuid,
                placement.device_index,
                placement.instance_id,
                placement.compute_weight,
                placement.vmem_limit_bytes,
                int(placement.whole_card),
            )
        except sqlite3.IntegrityError as error:
            raise Conflict(
                f"instance {placement.instance_id} of device {placement.device_index}",
                f"it cannot be given out ({error})",
                "try again: another request came between",
            ) from error

    def _update_container(self, container: Container) -> None:
        self._file.write(
            "UPDATE container SET boot_id = ?, hierarchy = ?, inode = ?, unified = ?, devices = ?,"
            " freezer = ?, online = ?, enforcer = ?, pod_uid = ?, name = ? WHERE container_id = ?",
            self._boot_id,
            *_cgroup_columns(container.cgroup),
            int(container.online),
            container.enforcer.value if container.enforcer else None,
            container.pod_uid,
            container.name,
            container.container_id,
        )

    def _update_instance(self, instance: Instance) -> None:
        self._file.write(
            "UPDATE instance SET device_index = ?, compute_weight = ?, vmem_limit_bytes = ?,"
            " whole_card = ? WHERE share_id = ?",
            instance.device_index,
            instance.compute_weight,
            instance.vmem_limit_bytes,
            int(instance.whole_card),
            instance.share_id,
        )


def _no_container(text: str) -> NotFound:
    return NotFound(
        f"container {shown(text)}",
        "no container of that id or name holds an instance",
        "see 'mgpu-cli container info'",
    )


def _at_path(container: Container, text: str) -> bool:
    cgroup = container.cgroup
    return text.startswith("/") and text in (cgroup.unified, cgroup.devices)


def _begins(container: Container, text: str) -> bool:
    return container.container_id.startswith(text)


def _same_cgroup(one: Cgroup, other: Cgroup) -> bool:
    return (one.hierarchy, one.inode) == (other.hierarchy, other.inode)


def _cgroup_columns(cgroup: Cgroup) -> Tuple[object, ...]:
    return cgroup.hierarchy, cgroup.inode, cgroup.unified, cgroup.devices, cgroup.freezer


def _containers(rows: Sequence[Tuple[Any, ...]]) -> List[Container]:
    """The containers of joined rows, in the order in which they first appear."""
    found: Dict[str, Tuple[Dict[str, Any], List[Instance]]] = {}
    for row in rows:
        head = dict(zip(_CONTAINER, row))
        held = row[len(_CONTAINER) :]
        instance = _instance(held[0], dict(zip(_INSTANCE, held[1:])))
        found.setdefault(row[0], (head, []))[1].append(instance)
    return [_container(head, instances) for head, instances in found.values()]


def _container(row: Dict[str, Any], instances: Sequence[Instance]) -> Container:
    return Container(
        container_id=row["container_id"],
        cgroup=Cgroup(row["inode"], row["unified"], row["devices"], row["freezer"]),
        instances=tuple(instances),
        online=bool(row["online"]),
        enforcer=Enforcer(row["enforcer"]) if row["enforcer"] else None,
        pod_uid=row["pod_uid"],
        name=row["name"],
        origin=row["origin"],
        created_at_s=row["created_at_s"],
    )


def _instance(share_id: int, row: Dict[str, Any]) -> Instance:
    return Instance(
        share_id=share_id,
        device_uuid=row["device_uuid"],
        device_index=row["device_index"],
        instance_id=row["instance_id"],
        compute_weight=row["compute_weight"],
        vmem_limit_bytes=row["vmem_limit_bytes"],
        whole_card=bool(row["whole_card"]),
    )
