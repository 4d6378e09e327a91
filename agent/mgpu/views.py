"""Devices and containers as the API and the CLI show them: mGPU's fields, in base units. Pure.

docs/cli.md says what each field means here. A field without a value is None (N/A in a table).
"""

from typing import Dict, List, Mapping, Optional

from mgpu.devices import Card
from mgpu.model import Container, Enforcer, Instance, MemoryUse
from mgpu.placement import CardLoad
from mgpu.ports import NodeFacts

Row = Dict[str, object]

# Both kinds of containers are taken, and each instance is placed by itself (docs/cli.md).
INSTANCE_DEPLOY_MODE = 1
ONLINE_OFFLINE_SWITCH = 2


def device_row(load: CardLoad, card: Card, facts: NodeFacts) -> Row:
    """One card, with what is given out of it."""
    device = load.device
    scheduled = int(facts.compute_scheduled)
    return {
        "device_id": device.index,
        "compute_free_weight": load.free_weight(online=False),
        "compute_free_weight_online": load.free_weight(online=True),
        "compute_load_balance_mode": 0,
        "compute_policy": int(load.policy),
        "compute_qos_enabled": scheduled,
        "compute_qos_enabled_native_burst": scheduled,
        "compute_timeslice": None,
        "compute_timeslice_native_burst": None,
        "compute_total_weight_native_burst": load.weight_online + load.weight_offline,
        "device_major": facts.card_major,
        "instance_major": facts.card_major,
        "instance_deploy_mode": INSTANCE_DEPLOY_MODE,
        "online_offline_switch": ONLINE_OFFLINE_SWITCH,
        "user_instance_major": facts.card_major,
        "vmem_free_bytes": load.free_bytes,
        "vmem_limit_bytes": load.memory_bytes,
        "device_name": device.name,
        "device_uuid": device.uuid,
        "device_minor": device.minor,
        "device_state": card.state,
        "device_state_reason": card.lost or None,
        "compute_policy_name": load.policy.label,
        "compute_weight_online": load.weight_online,
        "compute_weight_offline": load.weight_offline,
        "instances": len(load.instance_ids),
        "vmem_total_bytes": device.vmem_total_bytes,
        "vmem_usable_bytes": load.usable_bytes,
        "vmem_used_bytes": card.figures.used_bytes if card.figures else None,
        "utilisation_ratio": card.figures.utilisation_ratio if card.figures else None,
        "simulated": device.simulated,
    }


def container_rows(
    container: Container,
    cards: Mapping[str, Card],
    usage: Mapping[int, MemoryUse],
    facts: NodeFacts,
) -> List[Row]:
    """One row for each instance. ``cards`` are by uuid; without its card a row has no minor."""
    return [
        _instance_row(
            container,
            instance,
            cards.get(instance.device_uuid),
            usage.get(instance.share_id),
            facts,
        )
        for instance in container.instances
    ]


def _instance_row(
    container: Container,
    instance: Instance,
    card: Optional[Card],
    use: Optional[MemoryUse],
    facts: NodeFacts,
) -> Row:
    weight = instance.compute_weight
    enforcer = facts.enforcer_of(container)
    return {
        "container_id": container.short_id,
        "device_id": card.device.index if card else instance.device_index,
        "instance_id": instance.instance_id,
        "pod_uid": container.pod_uid or None,
        "compute_priority": 0,
        "compute_qos_enabled": int(facts.compute_scheduled),
        "compute_weight": 0 if container.online else weight,
        "compute_weight_native_burst": weight,
        "compute_weight_online": weight if container.online else 0,
        "minor": card.device.minor if card else None,
        "nvidia/compute_timeslice": None,
        "online": int(container.online),
        "position": "normal",
        "tasks": len(use.pids) if use else None,
        "vmem_info": vmem_info(use, card, instance.vmem_limit_bytes),
        "vmem_limit_bytes": instance.vmem_limit_bytes,
        "vmem_priority": 0,
        "vmem_qos_enabled": int(enforcer is not Enforcer.OBSERVE),
        "id": container.container_id,
        "name": container.name or None,
        "device_uuid": instance.device_uuid,
        "share_id": instance.share_id,
        "whole_card": instance.whole_card,
        "enforcer": enforcer.value,
        "cgroup": container.cgroup.path,
        "origin": container.origin,
        "created_at_s": container.created_at_s,
        "denials": use.denials if use else None,
        "kills": use.kills if use else None,
    }


def vmem_info(use: Optional[MemoryUse], card: Optional[Card], limit_bytes: int) -> Optional[Row]:
    """What an instance may use, uses and has free, in all and by PID; None without figures.

    The limit is the ledger's: after a change the kernel's copy follows within the same request.
    ``driver_bytes`` is the driver's own figure of the process, None where it gives none.
    """
    if use is None:
        return None
    driver = (card.process_bytes if card else None) or {}
    return {
        "limit_bytes": limit_bytes,
        "used_bytes": use.used_bytes,
        "free_bytes": max(0, limit_bytes - use.used_bytes),
        "pids": [
            {
                "pid": pid.pid,
                "used_bytes": pid.used_bytes,
                "tracked_bytes": pid.tracked_bytes,
                "unseen_bytes": pid.unseen_bytes,
                "driver_bytes": driver.get(pid.pid),
                "contexts": pid.contexts,
            }
            for pid in sorted(use.pids, key=lambda pid: pid.pid)
        ],
    }
