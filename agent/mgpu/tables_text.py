"""Tables as mgpu-cli prints them, from the JSON of the API. Pure, and quick to import."""

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mgpu.units import mib_down, mib_text, mib_up

NOTHING = "N/A"

Row = Mapping[str, Any]
# (title of the row or column, key in the JSON)
Fields = Sequence[Tuple[str, str]]

DEVICE_FIELDS: Fields = [
    ("device_id", "device_id"),
    ("compute_free_weight", "compute_free_weight"),
    ("compute_free_weight_online", "compute_free_weight_online"),
    ("compute_load_balance_mode", "compute_load_balance_mode"),
    ("compute_policy", "compute_policy"),
    ("compute_qos_enabled", "compute_qos_enabled"),
    ("compute_qos_enabled_native_burst", "compute_qos_enabled_native_burst"),
    ("compute_timeslice", "compute_timeslice"),
    ("compute_timeslice_native_burst", "compute_timeslice_native_burst"),
    ("compute_total_weight_native_burst", "compute_total_weight_native_burst"),
    ("device_major", "device_major"),
    ("instance_major", "instance_major"),
    ("instance_deploy_mode", "instance_deploy_mode"),
    ("online_offline_switch", "online_offline_switch"),
    ("user_instance_major", "user_instance_major"),
    ("vmem_free_bytes", "vmem_free_bytes"),
    ("vmem_limit", "vmem_limit_bytes"),
    ("device_name", "device_name"),
    ("device_uuid", "device_uuid"),
    ("device_state", "device_state"),
]
# What `device info` shows without -a.
DEVICE_SHORT = frozenset(
    (
        "device_id",
        "compute_free_weight",
        "compute_free_weight_online",
        "compute_policy",
        "vmem_free_bytes",
        "vmem_limit",
        "device_name",
        "device_state",
    )
)
CONTAINER_FIELDS: Fields = [
    ("container_id", "container_id"),
    ("device_id", "device_id"),
    ("instance_id", "instance_id"),
    ("pod_uid", "pod_uid"),
    ("compute_priority", "compute_priority"),
    ("compute_qos_enabled", "compute_qos_enabled"),
    ("compute_weight", "compute_weight"),
    ("compute_weight_native_burst", "compute_weight_native_burst"),
    ("compute_weight_online", "compute_weight_online"),
    ("minor", "minor"),
    ("nvidia/compute_timeslice", "nvidia/compute_timeslice"),
    ("online", "online"),
    ("position", "position"),
    ("tasks", "tasks"),
    ("vmem_info", "vmem_info"),
    ("vmem_limit", "vmem_limit_bytes"),
    ("vmem_priority", "vmem_priority"),
    ("vmem_qos_enabled", "vmem_qos_enabled"),
]
CHECK_FIELDS: Fields = [
    ("kind", "kind"),
    ("name", "name"),
    ("available", "available"),
    ("in_use", "in_use"),
    ("missing", "reason"),
    ("remedy", "remedy"),
]


def grid(rows: Sequence[Sequence[str]]) -> str:
    """The rows in a grid with a rule around each; a cell may have several lines."""
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [rule]
    for row in cells:
        for number in range(max(len(cell) for cell in row)):
            shown = (cell[number] if number < len(cell) else "" for cell in row)
            padded = (f" {text:<{width}} " for text, width in zip(shown, widths))
            lines.append("|" + "|".join(padded) + "|")
        lines.append(rule)
    return "\n".join(lines)


def devices(rows: Sequence[Row], everything: bool) -> str:
    """A vertical table for each device."""
    fields = [f for f in DEVICE_FIELDS if everything or f[0] in DEVICE_SHORT]
    return "\n".join(grid([(title, _cell(key, row)) for title, key in fields]) for row in rows)


def containers(rows: Sequence[Row]) -> str:
    """One table with a line for each instance."""
    return _listing(CONTAINER_FIELDS, rows)


def checks(rows: Sequence[Row]) -> str:
    """What this node can do and, where it cannot, what is missing."""
    return _listing(CHECK_FIELDS, rows)


def pairs(values: Row) -> str:
    """A vertical table of names and values."""
    return grid([(name, plain(value)) for name, value in values.items()])


def vmem_info(info: Optional[Mapping[str, Any]]) -> str:
    """``Free: N MiB`` and a line for each PID; the driver's own figure where it differs."""
    if info is None:
        return NOTHING
    lines = [f"Free: {mib_text(mib_down(info['free_bytes']))}"]
    for use in info["pids"]:
        line = f"PID {use['pid']}: {mib_text(mib_up(use['used_bytes']))}"
        driver = use["driver_bytes"]
        if driver is not None and mib_up(driver) != mib_up(use["used_bytes"]):
            line += f" (driver: {mib_text(mib_up(driver))})"
        lines.append(line)
    return "\n".join(lines)


def plain(value: object) -> str:
    """One value on one line; what has none is N/A."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(str(value).split())


def _listing(fields: Fields, rows: Sequence[Row]) -> str:
    lines: List[List[str]] = [[title for title, _ in fields]]
    lines += [[_cell(key, row) for _, key in fields] for row in rows]
    return grid(lines)


def _cell(key: str, row: Row) -> str:
    value = row.get(key)
    if key == "vmem_info":
        return vmem_info(value)
    if key == "vmem_limit_bytes" and value is not None:
        return mib_text(mib_down(value))
    if key == "tasks" and not value:
        return NOTHING
    return plain(value)


def top(frame: Dict[str, Any]) -> str:
    """One frame of ``mgpu-cli top``: the devices, then the instances, most memory first."""
    lines = [_top_head(frame["status"])]
    lines += [_top_device(row) for row in frame["devices"]]
    titles = ["CONTAINER", "DEV", "INST", "WEIGHT", "USED", "LIMIT", "USE%", "PIDS", "DENIED"]
    table = [[*titles, "KILLED", "NAME"]]
    rows = sorted(frame["containers"], key=lambda row: -_used(row))
    table += [_top_row(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    lines.append("")
    lines += [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in table
    ]
    return "\n".join(lines)


def _top_head(status: Row) -> str:
    simulation = "  (simulated GPU)" if status["simulated"] else ""
    return (
        f"mgpu-agent {status['version']}  tracker {status['tracker']}"
        f"  enforcer {status['enforcer']}{simulation}"
    )


def _top_device(row: Row) -> str:
    used = row["vmem_used_bytes"]
    shown = NOTHING if used is None else str(mib_up(used))
    given = mib_down(row["vmem_limit_bytes"])
    return (
        f"device {row['device_id']}  {row['device_name']}  {row['device_state']}"
        f"  {row['compute_policy_name']}  weight {row['compute_total_weight_native_burst']}/100"
        f"  memory given {given}, used {shown} of {mib_down(row['vmem_total_bytes'])} MiB"
    )


def _top_row(row: Row) -> List[str]:
    info = row["vmem_info"]
    limit = row["vmem_limit_bytes"]
    figures = [NOTHING, str(mib_down(limit)), NOTHING, NOTHING]
    if info is not None:
        percent = f"{100 * info['used_bytes'] // limit}%" if limit else NOTHING
        figures = [
            str(mib_up(info["used_bytes"])),
            str(mib_down(limit)),
            percent,
            str(len(info["pids"])),
        ]
    return [
        row["container_id"],
        str(row["device_id"]),
        str(row["instance_id"]),
        str(row["compute_weight_native_burst"]),
        *figures,
        plain(row["denials"]),
        plain(row["kills"]),
        plain(row["name"]),
    ]


def _used(row: Row) -> int:
    info = row["vmem_info"]
    return int(info["used_bytes"]) if info else 0
