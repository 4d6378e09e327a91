"""Which card of several an allocation is charged to."""

import struct

import pytest
from tests.kernel.puppet import CONTEXT, FAILS, properties

from mgpu.model import MIB


@pytest.fixture
def two(stage, cgroup):
    shares = stage.shares(2)
    stage.bind(cgroup.stat().st_ino, shares)
    yield shares
    stage.end_puppets()
    stage.release(cgroup.stat().st_ino, shares)


def test_memory_is_the_current_contexts_cards(stage, cgroup, two):
    puppet = stage.puppet(cgroup)
    puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=0xA)
    puppet.call("cuDevicePrimaryCtxRetain", "&", 1, handle=0xB)
    puppet.call("cuCtxSetCurrent", 0xB)
    puppet.alloc(100, 0x1)
    puppet.call("cuCtxPushCurrent_v2", 0xA)
    puppet.alloc(7, 0x2)
    puppet.call("cuCtxPopCurrent_v2", "&")
    puppet.alloc(20, 0x3)
    puppet.call("cuMemCreate", "&", 2 * MIB, properties(1, 1), 0, handle=0x4)
    used = [stage.use(share).used_bytes - CONTEXT for share in two]
    assert used == [7, 120 + 2 * MIB]
    puppet.end()
    assert stage.settled(two[0], 0)
    assert stage.settled(two[1], 0)


def test_a_pools_memory_is_its_own_cards_whatever_is_current(stage, cgroup, two):
    puppet = stage.puppet(cgroup)
    puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=0xA)
    puppet.call("cuCtxSetCurrent", 0xA)
    puppet.call("cuDeviceGetDefaultMemPool", "&", 1, handle=0x101)
    puppet.call("cuMemPoolCreate", "&", properties(1, 0), handle=0x102)
    puppet.call(
        "cuMemGetDefaultMemPool", "&", "=" + struct.pack("<II", 1, 1).hex(), 1, handle=0x103
    )
    puppet.call("cuDeviceGetMemPool", "&", 1, handle=0x104, result=FAILS)
    for pool, nbytes in ((0x101, 1), (0x102, 20), (0x103, 300), (0x104, 4000), (0, 50000)):
        puppet.call("cuMemAllocFromPoolAsync", "&", nbytes, pool, 0, handle=0x900 + nbytes)
    used = [stage.use(share).used_bytes for share in two]
    assert used == [CONTEXT + 20 + 4000 + 50000, 301]
    puppet.call("cuDevicePrimaryCtxReset_v2", 0)
    assert stage.use(two[0]).used_bytes == 54020, "memory of a pool outlives contexts"
    puppet.call("cuMemFreeAsync", 0x901, 0)
    assert stage.use(two[1]).used_bytes == 300


def test_memory_of_a_pool_of_the_hosts_is_not_counted(stage, share, puppet):
    puppet.call("cuMemPoolCreate", "&", properties(2, 0), handle=0x101)
    puppet.call("cuMemAllocFromPoolAsync", "&", 100, 0x101, 0, handle=0x900)
    assert stage.use(share).used_bytes == 0


def test_a_uuid_tells_which_card_an_ordinal_is(stage, cgroup, two):
    """CUDA_VISIBLE_DEVICES has turned them round: ordinal 0 is the second card."""
    puppet = stage.puppet(cgroup)
    assert puppet.call("cuDeviceGetUuid_v2", "&", 0, handle=1) == "0"
    puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=0xA)
    assert stage.use(two[0]).used_bytes == 0
    assert stage.use(two[1]).used_bytes == CONTEXT
