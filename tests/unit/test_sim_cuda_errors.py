"""Wrong use of the simulated libcuda: a call fails, charges nothing and breaks nothing.

The codes are those that cuda.h documents; where it is silent (a handle destroyed twice) they are
the simulation's choice. None has been held against a real driver.
"""

from tests.simlab import MAKERS, SimLab

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 1, 2, 3, 101
INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, DESTROYED = 201, 400, 500, 709

CODES = """
def codes(*answers):
    say([int(answer[0]) for answer in answers], held())
"""


def test_memory(lab: SimLab) -> None:
    said = lab.cuda(
        CODES
        + """
it = ok(c.cuMemAlloc(100))
answers = [c.cuMemAlloc(0), c.cuMemFree(int(it) + 1), c.cuDeviceGet(2), c.cuMemFreeHost(int(it))]
ok(c.cuMemFree(it))
answers += [c.cuMemFree(it), c.cuMemFree(0x1234), c.cuMemFreeAsync(it, 0),
            c.cuMemAllocManaged(9, 4)]
codes(*answers)
"""
    )
    assert said == [[INVALID_VALUE, INVALID_VALUE, NO_DEVICE] + [INVALID_VALUE] * 5, 0]


CALLS = [
    ("c.cuMemAllocPitch(100, 10, 3)", INVALID_VALUE),
    ("c.cuMemAllocPitch((1 << 64) - 100, 1, 4)", OUT_OF_MEMORY),
    ("c.cuMemAllocPitch(1 << 40, 1 << 30, 4)", OUT_OF_MEMORY),
    ("c.cuMemAlloc(1 << 62)", OUT_OF_MEMORY),
    ("c.cuMemAllocManaged((1 << 64) - 1, 1)", OUT_OF_MEMORY),
    ("c.cuMemHostAlloc(1 << 62, 0)", OUT_OF_MEMORY),
    ("c.cuArray3DCreate(solid(1 << 32, 1 << 32, 0, FLOAT, 1))", INVALID_VALUE),
    ("c.cuArray3DCreate(solid(131073, 0, 0, FLOAT, 1))", INVALID_VALUE),
    ("c.cuArray3DCreate(solid(16384, 1, 16385, FLOAT, 1))", INVALID_VALUE),
    ("c.cuArray3DCreate(solid(4, 0, 0, FLOAT, 3))", INVALID_VALUE),
    ("c.cuArrayCreate(flat(0, 4, FLOAT, 1))", INVALID_VALUE),
    ("c.cuArrayCreate(flat(4, 4, c.CUarray_format.CU_AD_FORMAT_NV12, 1))", INVALID_VALUE),
    ("c.cuMipmappedArrayCreate(solid(4, 4, 0, FLOAT, 1), 0)", INVALID_VALUE),
    ("c.cuMemCreate(MIB, properties, 0)", INVALID_VALUE),
    ("c.cuMemCreate(0, properties, 0)", INVALID_VALUE),
    ("c.cuMemCreate(1 << 60, properties, 0)", OUT_OF_MEMORY),
    ("c.cuMemAddressReserve(MIB, 0, 0, 0)", INVALID_VALUE),
    ("c.cuMemAllocFromPoolAsync(10, c.CUmemoryPool(0x1234), 0)", INVALID_VALUE),
    ("c.cuMemAllocAsync(10, c.CUstream(0x1234))", INVALID_HANDLE),
    ("c.cuCtxCreate(None, 0, 7)", NO_DEVICE),
    ("c.cuCtxDestroy(primary)", INVALID_CONTEXT),
    ("c.cuCtxPushCurrent(c.CUcontext(0x1234))", INVALID_CONTEXT),
    ("c.cuDevicePrimaryCtxRelease(1)", INVALID_CONTEXT),
    ("c.cuEventDestroy(c.CUevent(0x1234))", INVALID_HANDLE),
    ("c.cuStreamDestroy(c.CUstream(0x1234))", INVALID_HANDLE),
    ("c.cuModuleGetFunction(c.CUmodule(0x1234), b'spin_ns')", INVALID_HANDLE),
    ("c.cuLaunchKernel(c.CUfunction(0x1234), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)", INVALID_HANDLE),
]


def test_single_calls(lab: SimLab) -> None:
    said = lab.cuda(MAKERS + CODES + f"codes({', '.join(call for call, _ in CALLS)})")
    assert dict(zip([call for call, _ in CALLS], said[0])) == dict(CALLS)
    assert said[1] == 0


DESTROYED_TWICE = [
    ("c.cuEventCreate(0)", "c.cuEventDestroy(it)", INVALID_HANDLE),
    ("c.cuStreamCreate(0)", "c.cuStreamDestroy(it)", INVALID_HANDLE),
    ("c.cuArrayCreate(flat(4, 0, FLOAT, 1))", "c.cuArrayDestroy(it)", INVALID_HANDLE),
    (
        "c.cuMipmappedArrayCreate(solid(4, 4, 0, FLOAT, 1), 2)",
        "c.cuMipmappedArrayDestroy(it)",
        INVALID_HANDLE,
    ),
    ("c.cuMemPoolCreate(pool_properties)", "c.cuMemPoolDestroy(it)", INVALID_VALUE),
    ("c.cuMemCreate(2 * MIB, properties, 0)", "c.cuMemRelease(it)", INVALID_VALUE),
    ("c.cuModuleLoadData(b'x')", "c.cuModuleUnload(it)", INVALID_HANDLE),
    ("c.cuCtxCreate(None, 0, device)", "c.cuCtxDestroy(it)", INVALID_CONTEXT),
    ("c.cuMemAllocHost(100)", "c.cuMemFreeHost(it)", INVALID_VALUE),
    ("c.cuMemAddressReserve(2 * MIB, 0, 0, 0)", "c.cuMemAddressFree(it, 2 * MIB)", INVALID_VALUE),
]


def test_what_is_destroyed_twice(lab: SimLab) -> None:
    steps = "".join(
        f"it = ok({make})\nanswers += [{end}, {end}]\n" for make, end, _ in DESTROYED_TWICE
    )
    said = lab.cuda(MAKERS + CODES + "answers = []\n" + steps + "codes(*answers)")
    assert said == [[x for _, _, code in DESTROYED_TWICE for x in (0, code)], 0]


def test_handles_of_what_was_destroyed_are_of_no_use(lab: SimLab) -> None:
    said = lab.cuda(
        MAKERS
        + CODES
        + """
ended = ok(c.cuMemPoolCreate(pool_properties))
left = ok(c.cuMemAllocFromPoolAsync(5, ended, 0))
ok(c.cuMemPoolDestroy(ended))
array = ok(c.cuArrayCreate(flat(4, 0, FLOAT, 1)))
ok(c.cuArrayDestroy(array))
mipmap = ok(c.cuMipmappedArrayCreate(solid(4, 4, 0, FLOAT, 1), 2))
level = ok(c.cuMipmappedArrayGetLevel(mipmap, 1))
width = ok(c.cuArrayGetDescriptor(level)).Width
ok(c.cuMipmappedArrayDestroy(mipmap))
answers = [c.cuMemAllocFromPoolAsync(5, ended, 0), c.cuArrayGetDescriptor(array),
           c.cuArrayGetDescriptor(level), c.cuMemFree(left)]
assert width == 2
codes(*answers)
"""
    )
    assert said == [[INVALID_VALUE, INVALID_HANDLE, INVALID_HANDLE, 0], 0]


def test_without_a_context(lab: SimLab) -> None:
    said = lab.cuda(
        CODES
        + """
made = ok(c.cuCtxCreate(None, 0, device))
ok(c.cuCtxPushCurrent(made))
ok(c.cuCtxDestroy(made))
destroyed = c.cuMemAlloc(1)
ok(c.cuCtxPopCurrent())
ok(c.cuCtxSetCurrent(None))
codes(destroyed, c.cuMemAlloc(1), c.cuMemGetInfo(), c.cuCtxSynchronize(), c.cuStreamCreate(0))
"""
    )
    assert said == [[DESTROYED] + [INVALID_CONTEXT] * 4, 0]


def test_mapping_only_where_addresses_are_reserved_and_free(lab: SimLab) -> None:
    said = lab.cuda(
        MAKERS
        + CODES
        + """
handle = ok(c.cuMemCreate(4 * MIB, properties, 0))
place = int(ok(c.cuMemAddressReserve(8 * MIB, 0, 0, 0)))
own = int(ok(c.cuMemAlloc(8 * MIB)))
own += -own % (2 * MIB)
answers = [
    c.cuMemMap(own, 2 * MIB, 0, handle, 0),               # memory of another kind
    c.cuMemMap(place + 6 * MIB, 4 * MIB, 0, handle, 0),   # past the end
    c.cuMemMap(place, 6 * MIB, 0, handle, 0),             # more than there is
    c.cuMemMap(place, 4 * MIB, 0, handle, 0),
    c.cuMemMap(place + 2 * MIB, 2 * MIB, 0, handle, 0),   # over the one before
    c.cuMemAddressFree(place, 8 * MIB),                   # with a mapping in it
    c.cuMemUnmap(place, 2 * MIB),                         # half of a mapping
    c.cuMemUnmap(place, 8 * MIB),                         # with a hole
    c.cuMemUnmap(place, 4 * MIB),
    c.cuMemUnmap(place, 4 * MIB),
    c.cuMemAddressFree(place, 4 * MIB),                   # not as it was reserved
    c.cuMemAddressFree(place, 8 * MIB),
    c.cuMemRelease(handle),
]
say([int(a[0]) for a in answers])
"""
    )
    assert said == [1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]


def test_calls_before_cu_init(lab: SimLab) -> None:
    code = """
from cuda.bindings import driver as c
print([int(a[0]) for a in (c.cuDeviceGetCount(), c.cuMemAlloc(1), c.cuCtxSynchronize(),
                           c.cuMemFree(1), c.cuInit(7), c.cuInit(0))])
"""
    assert lab.python(code) == f"{[NOT_INITIALIZED] * 4 + [INVALID_VALUE, 0]}\n"
