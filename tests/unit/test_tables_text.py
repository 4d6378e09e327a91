"""Tables as mGPU's own client prints them."""

from pathlib import Path

from front_doubles import H200, Node

from mgpu import tables_text
from mgpu.model import MIB, PidUse


def test_grid_has_a_rule_between_all_rows() -> None:
    assert tables_text.grid([["device_id", "0"], ["vmem_limit", "4096 MiB"]]) == (
        "+------------+----------+\n"
        "| device_id  | 0        |\n"
        "+------------+----------+\n"
        "| vmem_limit | 4096 MiB |\n"
        "+------------+----------+"
    )


def test_a_cell_may_have_several_lines() -> None:
    assert tables_text.grid([["a", "b"], ["one\ntwo", "x"]]) == (
        "+-----+---+\n| a   | b |\n+-----+---+\n| one | x |\n| two |   |\n+-----+---+"
    )


def test_device_info_of_mgpu(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.bind("aaaa", device=1)
    table = tables_text.devices(node.service.device_info()["devices"], everything=True)
    second = table.split("\n+", 1)[1].rsplit("| device_id ", 1)[1]
    titles = [line.split("|")[1].strip() for line in ("| device_id " + second).split("\n")[::2]]
    assert titles[:17] == [
        "device_id",
        "compute_free_weight",
        "compute_free_weight_online",
        "compute_load_balance_mode",
        "compute_policy",
        "compute_qos_enabled",
        "compute_qos_enabled_native_burst",
        "compute_timeslice",
        "compute_timeslice_native_burst",
        "compute_total_weight_native_burst",
        "device_major",
        "instance_major",
        "instance_deploy_mode",
        "online_offline_switch",
        "user_instance_major",
        "vmem_free_bytes",
        "vmem_limit",
    ]
    assert "| vmem_limit                        | 4096 MiB " in table
    assert "| device_name                       | NVIDIA H200 (simulated) |" in table


def test_short_device_info_leaves_out_but_never_reorders(tmp_path: Path) -> None:
    node = Node(tmp_path)
    rows = node.service.device_info()["devices"]
    short = tables_text.devices(rows, everything=False).split("\n")
    full = tables_text.devices(rows, everything=True).split("\n")
    names = [line.split("|")[1].strip() for line in full if line.startswith("|")]
    kept = [line.split("|")[1].strip() for line in short if line.startswith("|")]
    assert kept == [name for name in names if name in tables_text.DEVICE_SHORT]


def test_container_info_of_mgpu(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.bind("7b0622290a6e", device=0)
    node.use("7b06")
    lines = tables_text.containers(node.service.container_info()["containers"]).split("\n")
    assert [title.strip() for title in lines[1].split("|")[1:-1]] == [
        "container_id",
        "device_id",
        "instance_id",
        "pod_uid",
        "compute_priority",
        "compute_qos_enabled",
        "compute_weight",
        "compute_weight_native_burst",
        "compute_weight_online",
        "minor",
        "nvidia/compute_timeslice",
        "online",
        "position",
        "tasks",
        "vmem_info",
        "vmem_limit",
        "vmem_priority",
        "vmem_qos_enabled",
    ]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        *["7b0622290a6e", "0", "0", "N/A", "0", "0", "0", "30", "30", "0", "N/A", "1", "normal"],
        "N/A",
        "Free: 4096 MiB",
        "4096 MiB",
        "0",
        "1",
    ]


def test_vmem_info_has_a_line_for_each_pid() -> None:
    info = {
        "free_bytes": 3584 * MIB - 1,
        "pids": [
            {"pid": 41, "used_bytes": 512 * MIB, "driver_bytes": 512 * MIB},
            {"pid": 42, "used_bytes": 1, "driver_bytes": 256 * MIB},
            {"pid": 43, "used_bytes": MIB, "driver_bytes": None},
        ],
    }
    # What is free is rounded down, what is used up: together never more than there is.
    assert tables_text.vmem_info(info) == (
        "Free: 3583 MiB\nPID 41: 512 MiB\nPID 42: 1 MiB (driver: 256 MiB)\nPID 43: 1 MiB"
    )
    assert tables_text.vmem_info(None) == "N/A"


def test_values_without_one_are_na() -> None:
    assert [tables_text.plain(v) for v in (None, "", 0, False, True, "a\nb")] == [
        "N/A",
        "N/A",
        "0",
        "no",
        "yes",
        "a b",
    ]


def test_top_puts_the_biggest_user_first(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for name in ("aaaa", "bbbb", "cccc"):
        node.bind(name, device=0, core=10)
    node.use("aaaa", PidUse(1, MIB))
    node.use("bbbb", PidUse(2, 2048 * MIB), PidUse(3, 1024 * MIB), denials=4, kills=1)
    node.cards.processes = {H200.uuid: {1: MIB}}
    lines = tables_text.top(node.service.top()).split("\n")
    assert lines[0] == "mgpu-agent 0.1.0  tracker cuda  enforcer kill  (simulated GPU)"
    assert lines[1] == (
        "device 0  NVIDIA H200 (simulated)  ok  fixed-share  weight 30/100"
        "  memory given 12288, used 1 of 143771 MiB"
    )
    assert [line.split()[0] for line in lines[5:]] == [
        "bbbb00000000",
        "aaaa00000000",
        "cccc00000000",
    ]
    assert lines[5].split()[1:] == ["0", "1", "10", "3072", "4096", "75%", "2", "4", "1", "N/A"]
    assert lines[7].split()[4:] == ["N/A", "4096", "N/A", "N/A", "N/A", "N/A", "N/A"]
