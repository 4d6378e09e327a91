"""The verbs of the agent: bind, run, set, release, policy. Plain values in, JSON-able ones out.

What is refused has changed nothing (changes.py). One change at a time; reading goes on meanwhile
(figures.py).
"""

import secrets
import threading
import time
from dataclasses import replace
from typing import Dict, List, Mapping, Optional

from mgpu import rules
from mgpu.changes import RUN_ORIGIN, Changes
from mgpu.errors import BadInput, Conflict, NotFound
from mgpu.figures import Figures
from mgpu.model import Container, Device, Enforcer, Request
from mgpu.placement import resize
from mgpu.ports import Parts, Peer
from mgpu.units import mib_down, mib_text, shown

Json = Dict[str, object]

RUN_ID_BYTES = 32


class Service:
    """What the API offers. Raises MgpuError; whatever raises has changed nothing."""

    def __init__(self, figures: Figures, parts: Parts) -> None:
        self.figures = figures
        self._ledger = figures.ledger
        self._parts = parts
        self._changes = Changes(figures, parts)
        self._changing = threading.RLock()

    # What is there

    def status(self) -> Json:
        return self.figures.status()

    def device_info(self) -> Json:
        return {"devices": self.figures.device_rows()}

    def container_info(self, container: Optional[str] = None) -> Json:
        """All containers, or one by id, name or the beginning of its id."""
        chosen = None if container is None else [self._ledger.find(container)]
        return {"containers": self.figures.container_rows(chosen)}

    def policy(self, device: str) -> Json:
        """The compute_policy of a device, given by index or UUID."""
        found = self._device(device)
        policy = rules.policy_of(
            found.uuid,
            self._ledger.policies(),
            self.figures.config().policy,
            self._ledger.containers(),
        )
        return {
            "device_id": found.index,
            "compute_policy": int(policy),
            "compute_policy_name": policy.label,
        }

    def check(self) -> Json:
        """What this node can do and, where it cannot, what is missing."""
        return {"checks": self._parts.check()}

    def top(self) -> Json:
        """Everything that one frame of ``mgpu-cli top`` shows."""
        return {"status": self.status(), **self.device_info(), **self.container_info()}

    # Changes

    def bind(self, values: Mapping[str, object]) -> Json:
        """Give the container behind ``target`` its instances."""
        target = str(values["target"])
        request = self._request(values)
        with self._changing:
            container_id, cgroup, pod_uid, name = self._parts.resolver.resolve(target)
            draft = Container(
                container_id=container_id,
                cgroup=cgroup,
                instances=(),
                online=request.online,
                enforcer=request.enforcer,
                pod_uid=str(values.get("pod_uid") or pod_uid),
                name=str(values.get("name") or name),
                created_at_s=time.time(),
            )
            return self._added(self._changes.add(draft, request), request)

    def start_run(self, values: Mapping[str, object], peer: Peer) -> Json:
        """Make a cgroup with instances of its own and move a waiting child of the peer into it."""
        request = self._request(values)
        with self._changing:
            pid = self._parts.processes.child_of(peer, int(str(values["pid"])))
            run_id = secrets.token_hex(RUN_ID_BYTES)
            cgroup = self._parts.groups.create(f"run-{run_id[:12]}")
            try:
                draft = Container(
                    container_id=run_id,
                    cgroup=cgroup,
                    instances=(),
                    online=request.online,
                    enforcer=request.enforcer,
                    name=str(values.get("name") or ""),
                    origin=RUN_ORIGIN,
                    created_at_s=time.time(),
                )
                container = self._changes.add(draft, request)
                self._changes.move_in(container, pid)
            except BaseException:
                self._changes.remove_cgroup(cgroup)
                raise
            return self._added(container, request)

    def set(self, container: str, values: Mapping[str, object]) -> Json:
        """Change weight, limit, online or enforcer of a container that runs."""
        force = bool(values.get("force"))
        if not set(values) - {"force"}:
            remedy = "give core, memory_mib, online or enforcer"
            raise BadInput(f"container {shown(container)}", "nothing to change", remedy)
        with self._changing:
            before = self._ledger.find(container)
            request = _changed(rules.request_of(before), values)
            warnings = rules.check(request)
            cards = self.figures.devices.cards()
            with self._ledger.transaction():
                after = resize(before, request, self.figures.loads_of(cards))
                self._check_fits(after, force)
                self._ledger.update(after)
            self._changes.apply_or(after.container_id, lambda: self._ledger.update(before))
            return {"containers": self.figures.container_rows([after]), "warnings": warnings}

    def release(self, container: str, force: bool = False) -> Json:
        """Take a container's instances away.

        One whose processes hold device memory is refused unless ``force``: what they hold would be
        promised to the next container. What is left running in a run's cgroup is killed.
        """
        with self._changing:
            found = self._ledger.find(container)
            if not force:
                self._check_idle(found)
            if found.origin == RUN_ORIGIN:
                self._changes.end_processes(found)
            return {"released": found.container_id, "warnings": self._changes.forget(found)}

    def release_vanished(self) -> List[str]:
        """Release the containers whose cgroup is gone, and runs that ended. Returns their ids."""
        with self._changing:
            return self._changes.release_vanished()

    def set_policy(self, device: str, policy: object) -> Json:
        """Set the compute_policy of a device, by number or name."""
        wanted = rules.parse_policy(policy)
        with self._changing:
            found = self._device(device)
            with self._ledger.transaction():
                rules.check_policy_change(found, wanted, self._ledger.containers())
                self._ledger.set_policy(found.uuid, wanted)
            warnings = self._changes.settle(None)
            return {**self.policy(device), "warnings": warnings}

    # Steps of the changes

    def _device(self, text: str) -> Device:
        devices = self.figures.devices.inventory()
        for device in devices:
            if text in (str(device.index), device.uuid):
                return device
        known = ", ".join(str(device.index) for device in devices)
        remedy = f"choose one of {known}" if known else "see 'mgpu-cli check' for why there is none"
        raise NotFound(f"device {shown(text)}", "no such device on this node", remedy)

    def _request(self, values: Mapping[str, object]) -> Request:
        """What the body asks for. Raises BadInput, RuleBroken or NotFound."""
        device, memory = values.get("device"), values.get("memory_mib")
        request = Request(
            core=rules.parse_core(values["core"]),
            memory_mib=None if memory is None else rules.parse_memory_mib(memory),
            cards=rules.parse_cards(values.get("cards", 1)),
            device_index=None if device is None else self._device(str(device)).index,
            online=bool(values.get("online", True)),
            enforcer=_enforcer(values.get("enforcer")),
            privileged=bool(values.get("privileged", False)),
            rdma=bool(values.get("rdma", False)),
            containers_in_pod=int(str(values.get("containers_in_pod", 1))),
        )
        rules.check(request)
        return request

    def _added(self, container: Container, request: Request) -> Json:
        return {
            "id": container.container_id,
            "containers": self.figures.container_rows([container]),
            "warnings": rules.check(request),
        }

    def _check_fits(self, after: Container, force: bool) -> None:
        """A limit below what is in use needs ``force``."""
        if force:
            return
        before = {i.share_id: i for i in self._ledger.get(after.container_id).instances}
        uses = self.figures.use_of(after)
        for instance in after.instances:
            if instance.vmem_limit_bytes >= before[instance.share_id].vmem_limit_bytes:
                continue
            use = uses[instance.share_id]
            asked = (
                f"memory {mib_text(mib_down(instance.vmem_limit_bytes))} "
                f"on device {instance.device_index}"
            )
            remedy = "free memory in it, or use --force: nothing new until it fits"
            if use is None:
                raise Conflict(asked, "what the container uses is not known now", remedy)
            if use.used_bytes > instance.vmem_limit_bytes:
                in_use = f"the container uses {use.used_bytes} bytes of it"
                raise Conflict(asked, in_use, remedy)

    def _check_idle(self, container: Container) -> None:
        holders = [
            str(pid.pid)
            for use in self.figures.use_of(container).values()
            if use is not None and use.used_bytes
            for pid in use.pids
        ]
        if holders:
            raise Conflict(
                f"container {container.short_id}",
                f"its processes {', '.join(holders[:8])} hold device memory",
                "stop them first, or use --force",
            )


def _enforcer(value: object) -> Optional[Enforcer]:
    return None if value in (None, "default") else Enforcer(value)


def _changed(request: Request, values: Mapping[str, object]) -> Request:
    if "core" in values:
        request = replace(request, core=rules.parse_core(values["core"]))
    if "memory_mib" in values:
        request = replace(request, memory_mib=rules.parse_memory_mib(values["memory_mib"]))
    if "online" in values:
        request = replace(request, online=bool(values["online"]))
    if "enforcer" in values:
        request = replace(request, enforcer=_enforcer(values["enforcer"]))
    return request
