"""What the programs count and refuse, call by call: libcuda here answers as the test tells it."""

import signal
import struct

import pytest
from tests.kernel.puppet import CONTEXT, FAILS, PITCH, properties

from mgpu.model import MIB, Enforcer

GIB = 1 << 30
CTX = 0xC0FFEE


def shape3d(width, height, depth, format_, channels, flags=0):
    """CUDA_ARRAY3D_DESCRIPTOR, in hex."""
    return "=" + struct.pack("<QQQIII", width, height, depth, format_, channels, flags).hex()


# Sizes worked out by hand from the headers' meaning of each argument.
PLAIN = [
    ("cuMemAlloc", ("&", 1000), 1000),
    ("cuMemAlloc_v2", ("&", 1), 1),
    ("cuMemAllocManaged", ("&", 4096, 1), 4096),
    ("cuMemAllocAsync", ("&", 77, 0), 77),
    ("cuMemAllocAsync_ptsz", ("&", 78, 0), 78),
    ("cuMemAllocFromPoolAsync", ("&", 79, 5, 0), 79),
    ("cuMemAllocFromPoolAsync_ptsz", ("&", 80, 5, 0), 80),
    # the driver's pitch counts: 100 rows of PITCH bytes, though 512 would do for 300
    ("cuMemAllocPitch_v2", ("&", "&", 300, 100, 4), 100 * PITCH),
    # 10 x 20 of 2 floats
    ("cuArrayCreate_v2", ("&", "=" + struct.pack("<QQII", 10, 20, 0x20, 2).hex()), 10 * 20 * 8),
    # a height of 0 is a line: 7 half floats of 4 channels
    ("cuArrayCreate", ("&", "=" + struct.pack("<QQII", 7, 0, 0x10, 4).hex()), 7 * 8),
    ("cuArray3DCreate_v2", ("&", shape3d(3, 4, 5, 0x01, 1)), 3 * 4 * 5),
    ("cuArray3DCreate", ("&", shape3d(3, 0, 0, 0x03, 1)), 3 * 4),
    # 8x4x2 + 4x2x1 + 2x1x1 + 1x1x1 = 75 elements of 4 bytes
    ("cuMipmappedArrayCreate", ("&", shape3d(8, 4, 2, 0x20, 1), 4), (64 + 8 + 2 + 1) * 4),
    # layers do not shrink: 8x4x6 + 4x2x6 elements of 1 byte
    ("cuMipmappedArrayCreate", ("&", shape3d(8, 4, 6, 0x01, 1, 1), 2), 192 + 48),
]


@pytest.mark.parametrize(("name", "arguments", "nbytes"), PLAIN, ids=lambda x: str(x)[:24])
def test_each_call_counts_its_bytes_and_gives_them_back(
    stage, share, puppet, name, arguments, nbytes
):
    assert puppet.call(name, *arguments, handle=0x700) == "0"
    assert stage.use(share).used_bytes == nbytes
    free = "cuMemFree_v2"
    if "Async" in name:
        free = "cuMemFreeAsync" + ("_ptsz" if name.endswith("_ptsz") else "")
    if "Array" in name:
        free = "cuMipmappedArrayDestroy" if "Mip" in name else "cuArrayDestroy"
    assert puppet.call(free, 0x700) == "0"
    assert stage.use(share).used_bytes == 0


@pytest.mark.parametrize(("name", "arguments", "nbytes"), PLAIN, ids=lambda x: str(x)[:24])
def test_a_call_that_the_driver_refuses_counts_nothing(
    stage, share, puppet, name, arguments, nbytes
):
    assert puppet.call(name, *arguments, result=FAILS) == str(FAILS)
    assert stage.use(share).used_bytes == 0
    assert puppet.free(0) == "0"
    assert stage.use(share).used_bytes == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cuMemAlloc_v2", (0, 100)),
        ("cuMemAllocPitch_v2", (0, 0, 100, 100, 4)),
        ("cuArrayCreate_v2", (0, 0)),
        ("cuArray3DCreate_v2", ("&", 0x10)),
        ("cuMipmappedArrayCreate", ("&", 0x10, 3)),
        ("cuMemCreate", ("&", 100, 0, 0)),
        ("cuMemMap", (0, 0, 0, 0)),
        ("cuCtxCreate_v2", (0, 0, 99)),
        ("cuDevicePrimaryCtxRetain", (0, 99)),
        ("cuMemRetainAllocationHandle", (0, 0)),
        ("cuMemUnmap", (0, 0)),
    ],
)
def test_null_and_unreadable_arguments_that_the_driver_refuses(
    stage, share, puppet, name, arguments
):
    assert puppet.call(name, *arguments, result=1) == "1"
    assert stage.use(share).used_bytes == 0


@pytest.mark.parametrize(
    "name",
    ["cuMemFree_v2", "cuMemFreeAsync", "cuArrayDestroy", "cuMemRelease", "cuMipmappedArrayDestroy"],
)
def test_a_handle_that_nobody_knows_frees_nothing(stage, share, puppet, name):
    puppet.alloc(100, 0x1)
    assert puppet.call(name, 0xDEAD) == "0"
    assert puppet.call(name, 0) == "0"
    assert stage.use(share).used_bytes == 100


def test_a_free_that_the_driver_refuses_leaves_the_memory_counted(stage, share, puppet):
    puppet.alloc(100, 0x1)
    assert puppet.free(0x1, result=FAILS) == str(FAILS)
    assert stage.use(share).used_bytes == 100
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 0
    puppet.free(0x1)  # twice
    assert stage.use(share).used_bytes == 0


def test_a_handle_that_the_driver_gives_out_again_counts_once(stage, share, puppet):
    """It must have been freed by a way that no probe sees."""
    puppet.alloc(100, 0x1)
    puppet.alloc(40, 0x1)
    assert stage.use(share).used_bytes == 40
    puppet.free(0x1)
    assert stage.use(share).used_bytes == 0


# ---- memory by handles (cuMemCreate) -------------------------------------------------------


def test_physical_memory_lives_until_handle_and_mappings_are_gone(stage, share, puppet):
    handle, at = 0x50, 0x7F0000000000
    create = ("&", 4 * MIB, properties(1, 0), 0)
    assert puppet.call("cuMemCreate", *create, handle=handle) == "0"
    assert stage.use(share).used_bytes == 4 * MIB
    puppet.call("cuMemMap", at, 2 * MIB, 0, handle, 0)
    puppet.call("cuMemMap", at + 2 * MIB, 2 * MIB, 2 * MIB, handle, 0)
    puppet.call("cuMemRetainAllocationHandle", "&", at, handle=handle)
    puppet.call("cuMemRelease", handle)
    puppet.call("cuMemRelease", handle)
    assert stage.use(share).used_bytes == 4 * MIB
    puppet.call("cuMemUnmap", at, 4 * MIB, result=FAILS)
    assert stage.use(share).used_bytes == 4 * MIB
    puppet.call("cuMemUnmap", at, 4 * MIB)  # both at once
    assert stage.use(share).used_bytes == 0


def test_host_memory_by_cuMemCreate_is_not_counted(stage, share, puppet):
    for location in (2, 3, 4):  # HOST, HOST_NUMA, HOST_NUMA_CURRENT
        puppet.call("cuMemCreate", "&", MIB, properties(location, 0), 0, handle=0x51)
    assert stage.use(share).used_bytes == 0


def test_the_last_references_released_at_once_give_back_once(stage, share, puppet):
    puppet.alloc(100 * MIB, 0x1)
    for _ in range(100):
        puppet.call("cuMemCreate", "&", 2 * MIB, properties(1, 0), 0, handle=0x52)
        for _ in range(3):
            puppet.call("cuMemRetainAllocationHandle", "&", 0, handle=0x52)
        assert stage.use(share).used_bytes == 102 * MIB
        assert puppet.call("cuMemRelease", 0x52, verb="together 4") == "joined"
        assert stage.use(share).used_bytes == 100 * MIB


# ---- contexts ------------------------------------------------------------------------------


def test_the_primary_context_counts_once_however_often_it_is_retained(stage, share, puppet):
    for _ in range(3):
        puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=CTX)
    assert stage.use(share).used_bytes == CONTEXT
    assert [use.contexts for use in stage.use(share).pids] == [1]
    puppet.call("cuCtxSetCurrent", CTX)
    puppet.alloc(100, 0x1)
    for _ in range(2):
        puppet.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert stage.use(share).used_bytes == CONTEXT + 100
    puppet.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert stage.use(share).used_bytes == 0, "its memory goes with it"


def test_reset_takes_the_primary_context_whatever_its_references(stage, share, puppet):
    for _ in range(3):
        puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=CTX)
    puppet.call("cuDevicePrimaryCtxReset_v2", 0, result=FAILS)
    assert stage.use(share).used_bytes == CONTEXT
    puppet.call("cuDevicePrimaryCtxReset_v2", 0)
    assert stage.use(share).used_bytes == 0
    puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=CTX)
    assert stage.use(share).used_bytes == CONTEXT


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cuCtxCreate", ("&", 0, 0)),
        ("cuCtxCreate_v2", ("&", 0, 0)),
        ("cuCtxCreate_v3", ("&", 0, 0, 0, 0)),
        ("cuCtxCreate_v4", ("&", 0, 0, 0)),
    ],
)
def test_a_context_takes_what_was_allocated_in_it_along(stage, share, puppet, name, arguments):
    puppet.call("cuDevicePrimaryCtxRetain", "&", 0, handle=CTX)
    puppet.call("cuCtxSetCurrent", CTX)
    puppet.alloc(1000, 0x1)
    puppet.call(name, *arguments, handle=0xABC)
    puppet.alloc(500, 0x2)
    puppet.alloc(70, 0x3)
    puppet.free(0x3)
    assert stage.use(share).used_bytes == 2 * CONTEXT + 1500
    puppet.call("cuCtxDestroy_v2", 0xABC)
    assert stage.use(share).used_bytes == CONTEXT + 1000
    puppet.free(0x2)  # gone already
    assert stage.use(share).used_bytes == CONTEXT + 1000
    puppet.alloc(5, 0x4)  # the one below is current again
    puppet.call("cuDevicePrimaryCtxReset_v2", 0)
    assert stage.use(share).used_bytes == 0


def test_a_context_that_the_driver_refuses_or_keeps(stage, share, puppet):
    puppet.call("cuCtxCreate_v2", "&", 0, 0, result=FAILS)
    assert stage.use(share).used_bytes == 0
    puppet.call("cuCtxCreate_v2", "&", 0, 0, handle=CTX)
    puppet.call("cuCtxDestroy_v2", CTX, result=FAILS)
    assert stage.use(share).used_bytes == CONTEXT
    assert [use.contexts for use in stage.use(share).pids] == [1]


# ---- the limit -----------------------------------------------------------------------------


def test_to_the_byte(stage, share, puppet):
    assert puppet.alloc(GIB, 0x1) == "0"
    assert stage.use(share).free_bytes == 0
    assert puppet.alloc(1, 0x2) == ""
    assert puppet.process.wait() == -signal.SIGKILL
    (kill,) = stage.tables.take_kills()
    assert (kill.share_id, kill.pid, kill.comm, kill.killed) == (share, puppet.pid, "puppet", True)
    assert (kill.asked_bytes, kill.held_bytes) == (1, GIB)
    assert (kill.used_bytes, kill.limit_bytes) == (GIB, GIB)
    assert stage.settled(share, 0)
    assert (stage.use(share).denials, stage.use(share).kills) == (1, 1)


def test_observe_counts_and_lets_go(stage, share, cgroup, puppet):
    stage.bind(cgroup.stat().st_ino, (share,), limit=100, enforcer=Enforcer.OBSERVE)
    assert puppet.alloc(150, 0x1) == "0"
    (seen,) = stage.tables.take_kills()
    assert (seen.killed, seen.asked_bytes, seen.used_bytes) == (False, 150, 0)
    assert stage.use(share).used_bytes == 150
    assert (stage.use(share).denials, stage.use(share).kills) == (1, 0)


@pytest.mark.parametrize(
    "nbytes", [1 << 63, (1 << 64) - 1, (1 << 64) - GIB, 1 << 48, (1 << 48) + 1]
)
def test_no_size_wraps_the_counter(stage, share, puppet, nbytes):
    puppet.alloc(100, 0x1)
    assert puppet.alloc(nbytes, 0x2) == ""
    assert stage.use(share).used_bytes == 100
    puppet.end()
    assert stage.settled(share, 0)


def test_no_pitch_that_a_program_makes_up_takes_anything_from_the_count(stage, share, puppet):
    """The pitch is read from the program's memory, which another thread can write to."""
    puppet.alloc(1000, 0x1)
    # The puppet's own place for the pitch: rows of 2^20 bytes though PITCH is what comes back.
    assert puppet.call("cuMemAllocPitch_v2", "&", "&", MIB, 2, 4, handle=0x2) == "0"
    assert stage.use(share).used_bytes == 1000 + 2 * MIB


def test_unseen_bytes_count_towards_the_limit(stage, share, puppet):
    stage.tables.set_unseen({(puppet.pid, share): GIB - 100})
    assert puppet.alloc(100, 0x1) == "0"
    assert puppet.alloc(1, 0x2) == ""


def test_racing_requests_are_never_both_admitted(stage, share, cgroup):
    """Two allocations of 600 MiB fit one by one, not together."""
    puppet = stage.puppet(cgroup)
    for _ in range(20):
        answer = puppet.alloc(600 * MIB, 0x1, verb="together 2")
        assert stage.use(share).used_bytes <= GIB
        assert answer == "", "both were let through"
        puppet.end()
        assert stage.settled(share, 0)
        puppet = stage.puppet(cgroup)


def test_threads_and_a_storm_leave_the_counter_exact(stage, share, puppet):
    puppet.alloc(10, 0x10)
    assert puppet.tell("storm", 8, 3000, 4096) == "over"
    assert stage.use(share).used_bytes == 10
    puppet.alloc(5, 0x20, verb="thread")
    puppet.free(0x10, verb="thread")
    assert stage.use(share).used_bytes == 5
