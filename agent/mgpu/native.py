"""Enforcer `native`: the driver's own memory limit of a cgroup on a card.

Drivers from R615 have it (nvml.h, nvmlDeviceSetMemoryLimits_v1): over the limit the program gets
CUDA's out of memory, and inside the cgroup the card looks as large as the limit. The driver clears
a limit when its cgroup is removed. Limits are of the unified hierarchy.
"""

from typing import Any, Optional, Tuple

import pynvml  # type: ignore[import-untyped]

from mgpu.cgroups import Cgroups
from mgpu.devices import Devices
from mgpu.errors import MgpuError, NotCapable
from mgpu.model import Cgroup, Container

Missing = Optional[Tuple[str, str]]  # (reason, remedy); None: nothing is

_NONE = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
_OLD = ("the driver has no limits of its own", "use a driver from R615, or another enforcer")


class NativeLimits:
    """Reads and writes the driver's limits; keeps nothing but whether this driver has them."""

    def __init__(self, devices: Devices, cgroups: Cgroups) -> None:
        self._devices = devices
        self._cgroups = cgroups
        self._asked = ""  # the driver version that `_missing` is of
        self._missing: Missing = _OLD

    def missing(self) -> Missing:
        """What a limit needs and this node lacks."""
        if self._cgroups.unified is None:
            return "no cgroup2 hierarchy is mounted", "mount cgroup2, or use another enforcer"
        try:
            version = self._devices.driver_version()
            if version != self._asked:
                self._missing, self._asked = self._ask(), version
        except MgpuError as error:
            return error.reason, error.remedy
        return self._missing

    def holds(self, cgroup: Cgroup) -> bool:
        """Whether this cgroup can have a limit here."""
        return cgroup.unified is not None and self.missing() is None

    def keep(self, container: Container, wanted: bool) -> None:
        """Let the container have its limits, or none. Raises NotCapable.

        Does nothing where the driver has it so already, or never has limits.
        """
        if not self.holds(container.cgroup):
            if wanted:
                reason, remedy = self.missing() or (
                    "the container has no cgroup of its own in the unified hierarchy",
                    "use another enforcer for it",
                )
                raise NotCapable("enforcer native", reason, remedy)
            return
        for instance in container.instances:
            limit = instance.vmem_limit_bytes if wanted else _NONE
            self._set(instance.device_uuid, container.cgroup, limit)

    def clear(self, cgroup: Cgroup) -> None:
        """Take the limits of a cgroup away from every card."""
        if self.holds(cgroup):
            for device in self._devices.inventory():
                self._set(device.uuid, cgroup, _NONE)

    def _set(self, uuid: str, cgroup: Cgroup, limit_bytes: int) -> None:
        folder = self._folder(cgroup)

        def work(handle: Any) -> None:
            if _limit_of(handle, folder) != limit_bytes:
                limits = pynvml.c_nvmlSetMemoryLimits_v1_t(folder, 0, limit_bytes)
                pynvml.nvmlDeviceSetMemoryLimits_v1(handle, limits)

        try:
            self._devices.ask(uuid, work)
        except pynvml.NVMLError as error:
            asked = f"memory limit of cgroup {cgroup.path} on device {uuid}"
            raise NotCapable(asked, f"NVML says: {error}", "use another enforcer") from error

    def _ask(self) -> Missing:
        """Ask the first card for the limit of the root, which never has one."""
        folder = str(self._root()).encode()
        for device in self._devices.inventory():
            try:
                self._devices.ask(device.uuid, lambda handle: _limit_of(handle, folder))
            except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                return _OLD
            except pynvml.NVMLError as error:
                return f"NVML says: {error}", "see what ails the card"
            return None
        return "no card is there", "see 'mgpu-cli device info'"

    def _folder(self, cgroup: Cgroup) -> bytes:
        return f"{self._root()}{cgroup.unified}".encode()

    def _root(self) -> str:
        assert self._cgroups.unified is not None
        return str(self._cgroups.unified.mount)


def _limit_of(handle: Any, folder: bytes) -> int:
    limits = pynvml.c_nvmlGetMemoryLimits_v1_t(folder)
    try:
        pynvml.nvmlDeviceGetMemoryLimits_v1(handle, limits)
    except pynvml.NVMLError_NotFound:
        return int(_NONE)
    return int(limits.hardLimit)
