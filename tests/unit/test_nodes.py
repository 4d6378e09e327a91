"""Numbers from /proc/devices, and which nodes there must be."""

import pytest

from mgpu.errors import ConfigInvalid, NotCapable
from mgpu.model import Cgroup, Container, Device, Instance
from mgpu.nodes import LOCAL_MAJORS, Nodes, Numbers, choose_numbers, read_majors, wanted_nodes

OLD_DRIVER = """Character devices:
  1 mem
195 nvidia-frontend
235 nvidia-caps
508 nvidia-uvm

Block devices:
 60 not-a-character-device
"""
NEW_DRIVER = OLD_DRIVER.replace("nvidia-frontend", "nvidia").replace(
    "235 nvidia-caps\n", "195 nvidia-modeset\n195 nvidiactl\n236 nvidia-nvswitch\n"
)


def test_numbers_of_an_older_driver():
    numbers = choose_numbers(read_majors(OLD_DRIVER), None)
    assert numbers == Numbers(195, 255, 508, 0, False, (235,))


def test_numbers_of_a_newer_driver():
    numbers = choose_numbers(read_majors(NEW_DRIVER), 60)
    assert numbers == Numbers(195, 255, 508, 0, False, (236,))


def test_a_driver_without_uvm_loaded():
    numbers = choose_numbers({"nvidia": 195}, None)
    assert numbers.card_major == 195 and numbers.uvm_major == -1


def test_a_simulation_takes_a_free_local_major():
    assert choose_numbers({"mem": 1}, None) == Numbers(60, 255, 60, 254, True)
    assert choose_numbers({"mem": 1, "x": 60}, None).card_major == 61


def test_a_simulation_keeps_its_major_while_it_is_free():
    assert choose_numbers({}, 125).card_major == 125
    assert choose_numbers({"x": 125}, 125).card_major == 60
    # A major of a driver that is gone now was never one for local use.
    assert choose_numbers({}, 195).card_major == 60


def test_no_local_major_is_free():
    with pytest.raises(NotCapable, match="no local device major is free"):
        choose_numbers({str(major): major for major in LOCAL_MAJORS}, None)


def test_numbers_are_read_of_proc_devices(tmp_path):
    (tmp_path / "devices").write_text(OLD_DRIVER)
    assert Nodes(tmp_path, tmp_path).numbers().card_major == 195


DEVICES = (Device(0, "GPU-a", "A", 0, 1), Device(1, "GPU-b", "B", 3, 1))


def _container(*instances, name="c" * 64):
    return Container(name, Cgroup(1, "/c"), instances)


def _instance(uuid, index, number):
    return Instance(1, uuid, index, number, 30, 1)


def test_nodes_that_must_be():
    container = _container(_instance("GPU-a", 0, 2), _instance("GPU-b", 1, 0))
    nodes = wanted_nodes(Numbers(195, 255, 508, 0, False), DEVICES, [container])
    assert {tuple(node) for node in nodes} == {
        ("mgpu0", 195, 0),
        ("mgpu1", 195, 3),
        ("mgpu0inst2", 195, 0),
        ("mgpu0ctl-cccccccccccc", 195, 255),
        ("mgpu1inst0", 195, 3),
        ("mgpu1ctl-cccccccccccc", 195, 255),
    }


def test_an_instance_is_named_after_its_cards_index_of_now():
    """The ledger knows the index at the bind: cards may be numbered anew since."""
    nodes = wanted_nodes(
        Numbers(195, 255, 508, 0, False), DEVICES, [_container(_instance("GPU-b", 0, 0))]
    )
    assert ("mgpu1inst0", 195, 3) in {tuple(node) for node in nodes}


def test_an_instance_of_a_card_that_is_gone_has_no_node():
    nodes = wanted_nodes(
        Numbers(195, 255, 508, 0, False), DEVICES[:1], [_container(_instance("GPU-b", 1, 0))]
    )
    assert [node.name for node in nodes] == ["mgpu0"]


@pytest.mark.parametrize("key", ["owner", "group"])
def test_an_unknown_owner(key):
    with pytest.raises(ConfigInvalid, match="no-such-name"):
        Nodes(**{key: "no-such-name"})
