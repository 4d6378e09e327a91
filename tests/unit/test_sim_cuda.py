"""The simulated libcuda through NVIDIA's own Python binding; every figure worked out by hand."""

import ctypes
import re
import subprocess
from pathlib import Path
from typing import List

import pytest
from tests.simlab import CONTEXT_BYTES, MAKERS, MIB, ROOT, SIM, SimLab


def test_every_function_of_the_header_is_there() -> None:
    text = (ROOT / "build/sim/include/cuda/cuda.h").read_text()
    declared = set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w+)\(", text))
    library = ctypes.CDLL(str(SIM / "libcuda.so.1"))
    assert len(declared) > 480
    assert [name for name in sorted(declared) if not hasattr(library, name)] == []


def readelf(*words: str) -> str:
    command = ["readelf", "--wide", *words, str(SIM / "libcuda.so.1")]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def test_nothing_else_is_exported_and_no_export_is_called_from_within() -> None:
    """So that a probe on an export fires once for each call of a client."""
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines()]
    exported = [x[7] for x in symbols if len(x) == 8 and x[4] == "GLOBAL" and x[6] != "UND"]
    assert len(exported) > 600
    assert [name for name in exported if not name.startswith("cu")] == []
    through = [line.split() for line in readelf("--relocs").splitlines()]
    assert [x[4] for x in through if len(x) > 4 and x[4].startswith("cu")] == []


@pytest.mark.parametrize(
    ("name", "version", "per_thread", "symbol"),
    [
        ("cuMemAlloc", 13000, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
        ("cuCtxCreate", 12000, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
        ("cuMemAllocAsync", 13000, 0, "cuMemAllocAsync"),
        ("cuMemAllocAsync", 13000, 1, "cuMemAllocAsync_ptsz"),
        ("cuMemcpyHtoD", 13000, 1, "cuMemcpyHtoD_v2_ptds"),
        ("cuLaunchKernel", 7000, 1, "cuLaunchKernel_ptsz"),
    ],
)
def test_entry_points_are_the_exports_themselves(
    name: str, version: int, per_thread: int, symbol: str
) -> None:
    """So that a probe on an export sees every client, however it found the function."""
    library = ctypes.CDLL(str(SIM / "libcuda.so.1"))
    found, status = ctypes.c_void_p(), ctypes.c_int(-1)
    flags = ctypes.c_uint64(2 if per_thread else 0)
    result = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), version, flags, ctypes.byref(status)
    )
    assert (result, status.value) == (0, 0)
    assert found.value == ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value


def test_unknown_and_too_new_entry_points() -> None:
    library = ctypes.CDLL(str(SIM / "libcuda.so.1"))
    found, status = ctypes.c_void_p(1), ctypes.c_int(-1)
    for name, version, code in ((b"cuNone", 13000, 1), (b"cuMemAllocAsync", 3000, 2)):
        result = library.cuGetProcAddress_v2(
            name, ctypes.byref(found), version, ctypes.c_uint64(0), ctypes.byref(status)
        )
        assert (result, status.value, found.value) == (500, code, None)


def test_devices_are_the_cards(lab: SimLab) -> None:
    said = lab.cuda(
        """
say([ok(c.cuDeviceGetCount()), ok(c.cuDriverGetVersion()),
     [[ok(c.cuDeviceGetName(64, d)).rstrip(b"\\0 ").decode(), ok(c.cuDeviceTotalMem(d)),
       bytes(ok(c.cuDeviceGetUuid(d)).bytes).hex(),
       ok(c.cuDeviceGetAttribute(c.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                                 d))] for d in (0, 1)]])
""",
    )
    cards = lab.status()["cards"]
    assert said[:2] == [2, 13000]
    assert [row[0] for row in said[2]] == ["NVIDIA H200 (simulated)", "NVIDIA A10 (simulated)"]
    assert [row[1] for row in said[2]] == [143771 * MIB, 23028 * MIB]
    for row, card in zip(said[2], cards):
        assert row[2] == card["uuid"].replace("GPU-", "").replace("-", "")
    assert [row[3] for row in said[2]] == [9, 8]


ALLOCATIONS = [
    ("ok(c.cuMemAlloc(1))", "c.cuMemFree(it)", 1),
    ("ok(c.cuMemAlloc(12345))", "c.cuMemFree(it)", 12345),
    ("ok(c.cuMemAllocPitch(1000, 10, 4))[0]", "c.cuMemFree(it)", 1024 * 10),
    ("ok(c.cuMemAllocPitch(512, 3, 16))[0]", "c.cuMemFree(it)", 512 * 3),
    ("ok(c.cuMemAllocManaged(777, 1))", "c.cuMemFree(it)", 777),
    ("ok(c.cuMemAllocAsync(99, 0))", "c.cuMemFreeAsync(it, 0)", 99),
    ("ok(c.cuMemAllocAsync(99, 0))", "c.cuMemFree(it)", 99),
    ("ok(c.cuMemAllocFromPoolAsync(55, pool, 0))", "c.cuMemFreeAsync(it, 0)", 55),
    ("ok(c.cuArrayCreate(flat(100, 0, FLOAT, 1)))", "c.cuArrayDestroy(it)", 100 * 4),
    ("ok(c.cuArrayCreate(flat(100, 50, HALF, 4)))", "c.cuArrayDestroy(it)", 100 * 50 * 2 * 4),
    ("ok(c.cuArray3DCreate(solid(10, 20, 30, BYTE, 2)))", "c.cuArrayDestroy(it)", 10 * 20 * 30 * 2),
    (
        "ok(c.cuMipmappedArrayCreate(solid(64, 32, 0, FLOAT, 2), 3))",
        "c.cuMipmappedArrayDestroy(it)",
        (64 * 32 + 32 * 16 + 16 * 8) * 4 * 2,
    ),
    (
        "ok(c.cuMipmappedArrayCreate(solid(8, 8, 6, BYTE, 1, LAYERED), 2))",
        "c.cuMipmappedArrayDestroy(it)",
        8 * 8 * 6 + 4 * 4 * 6,
    ),
    ("ok(c.cuMemCreate(6 * MIB, properties, 0))", "c.cuMemRelease(it)", 6 * MIB),
    ("ok(c.cuMemAllocHost(1000))", "c.cuMemFreeHost(it)", 0),
    ("ok(c.cuMemHostAlloc(1000, 0))", "c.cuMemFreeHost(it)", 0),
]


def test_every_allocation_is_charged_exactly_and_given_back(lab: SimLab) -> None:
    steps = "".join(
        f"it = {make}\nbooks.append(held())\nok({free})\nbooks.append(held())\n"
        for make, free, _ in ALLOCATIONS
    )
    said = lab.cuda(MAKERS + "books = []\n" + steps + "say(books)")
    assert said == [figure for _, _, size in ALLOCATIONS for figure in (size, 0)]


def test_physical_memory_goes_with_its_last_reference(lab: SimLab) -> None:
    said = lab.cuda(
        MAKERS
        + """
books = []
handle = ok(c.cuMemCreate(4 * MIB, properties, 0))
at = ok(c.cuMemAddressReserve(8 * MIB, 0, 0, 0))
ok(c.cuMemMap(at, 4 * MIB, 0, handle, 0))
books.append(held())
ok(c.cuMemRelease(handle))
books.append(held())  # the mapping holds it
again = ok(c.cuMemRetainAllocationHandle(int(at)))
ok(c.cuMemsetD8(at, 7, 4 * MIB))
ok(c.cuMemUnmap(at, 4 * MIB))
books.append(held())  # the retained handle does
ok(c.cuMemRelease(again))
books.append(held())
ok(c.cuMemAddressFree(at, 8 * MIB))
say(books, int(c.cuMemCreate(4 * MIB - 1, properties, 0)[0]), int(c.cuMemRelease(again)[0]))
""",
    )
    assert said == [[4 * MIB, 4 * MIB, 4 * MIB, 0], 1, 1]


def test_contexts_cost_and_take_their_memory_with_them(lab: SimLab) -> None:
    said = lab.cuda(
        """
books = [held(contexts=0)]
made = ok(c.cuCtxCreate(None, 0, device))
ok(c.cuMemAlloc(1000))
books.append(held(contexts=0))
ok(c.cuCtxDestroy(made))
books.append(held(contexts=0))
ok(c.cuCtxSetCurrent(primary))
ok(c.cuMemAlloc(500))
ok(c.cuDevicePrimaryCtxRelease(device))
books.append(held(contexts=0))
say(books)
""",
    )
    context = CONTEXT_BYTES
    assert said == [context, 2 * context + 1000, context, 0]


def test_context_size_is_configurable(tmp_path: Path) -> None:
    lab = SimLab(tmp_path, "context_mib = 10\n")
    assert lab.cuda("say(held(contexts=0))") == 10 * MIB


def test_a_card_refuses_what_it_has_not(tmp_path: Path) -> None:
    lab = SimLab(tmp_path, "[card0]\nmemory_mib = 1000\nreserved_mib = 44\n")
    said = lab.cuda(
        """
left = (1000 - 44 - 256) * MIB
too_much = int(c.cuMemAlloc(left + 1)[0])
it = ok(c.cuMemAlloc(left))
full = ok(c.cuMemGetInfo())
one_more = int(c.cuMemAlloc(1)[0])
context = int(c.cuCtxCreate(None, 0, device)[0])
ok(c.cuMemFree(it))
say([too_much, one_more, context, full, held()])
""",
    )
    out_of_memory = 2
    assert said == [out_of_memory, out_of_memory, out_of_memory, [0, 956 * MIB], 0]


def test_racing_processes_never_hold_more_than_the_card_has(tmp_path: Path) -> None:
    lab = SimLab(tmp_path, "context_mib = 1\n[card0]\nmemory_mib = 100\n")
    greedy = """
say(1)
sys.stdin.readline()
got = 0
while int(c.cuMemAlloc(99 * 1024)[0]) == 0:
    got += 1
say(got)
sys.stdin.read()
"""
    processes = [lab.start(greedy) for _ in range(4)]
    try:
        assert [process.read() for process in processes] == [1] * 4
        for process in processes:
            assert process.popen.stdin
            print("go", file=process.popen.stdin, flush=True)
        got = sum(process.read() for process in processes)
        # 96 MiB are left by four contexts; two at the door at once may both be refused
        assert 96 * 1024 // 99 - 8 <= got <= 96 * 1024 // 99
        assert lab.status()["cards"][0]["used_bytes"] == 4 * MIB + got * 99 * 1024
    finally:
        for process in processes:
            process.kill()


def test_memory_holds_what_is_written(lab: SimLab) -> None:
    said = lab.cuda(
        """
data = bytes(range(256))
a, b = ok(c.cuMemAlloc(256)), ok(c.cuMemAlloc(256))
ok(c.cuMemcpyHtoD(a, data, 256))
ok(c.cuMemcpyDtoD(b, a, 256))
back = bytearray(256)
ok(c.cuMemcpyDtoH(back, b, 256))
ok(c.cuMemsetD32(a, 0x01020304, 64))
filled = bytearray(8)
ok(c.cuMemcpyDtoH(filled, a, 8))
say(bytes(back) == data, list(filled))
""",
    )
    assert said == [True, [4, 3, 2, 1, 4, 3, 2, 1]]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["A10"]),
        ("1,0", ["A10", "H200"]),
        ("0,7,1", ["H200"]),
        ("GPU-51300000-0000-4000-8000-000000000001", ["A10"]),
    ],
)
def test_visible_devices(lab: SimLab, visible: str, names: List[str]) -> None:
    code = "say([ok(c.cuDeviceGetName(64, d)).split()[1].decode() for d in range(99) if d < "
    said = lab.cuda(code + "ok(c.cuDeviceGetCount())])", CUDA_VISIBLE_DEVICES=visible)
    assert said == names


NO_BEGIN = "from cuda.bindings import driver as c\nprint(int(c.cuInit(0)[0]))"


def test_without_a_node_there_is_no_card(lab: SimLab) -> None:
    (lab.nodes / "nvidia0").unlink()
    assert lab.cuda("say(ok(c.cuDeviceGetCount()), ok(c.cuDeviceTotalMem(0)))") == [1, 23028 * MIB]
    (lab.nodes / "nvidia1").rename(lab.nodes / "mgpu1")
    assert lab.cuda("say(ok(c.cuDeviceGetCount()))") == 1
    (lab.nodes / "mgpu1").unlink()
    assert lab.python(NO_BEGIN) == "100\n"  # CUDA_ERROR_NO_DEVICE


def test_a_child_of_a_cuda_process_cannot_use_it_and_costs_nothing(lab: SimLab) -> None:
    said = lab.cuda(
        """
ok(c.cuMemAlloc(100))
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, bytes([int(c.cuMemAlloc(100)[0]), int(c.cuInit(0)[0])]))
    os._exit(0)
os.wait()
say(list(os.read(reader, 2)), held())
""",
    )
    assert said == [[3, 3], 100]  # CUDA_ERROR_NOT_INITIALIZED


def test_threads_that_allocate_and_free_at_once_leave_nothing(lab: SimLab) -> None:
    said = lab.cuda(
        """
import threading
def work(seed):
    ok(c.cuCtxSetCurrent(primary))
    for i in range(200):
        it = ok(c.cuMemAlloc(seed * 1000 + i))
        ok(c.cuMemFree(it))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
say(held())
""",
    )
    assert said == 0


def test_physical_memory_keeps_its_content_wherever_it_is_mapped(lab: SimLab) -> None:
    said = lab.cuda(
        MAKERS
        + """
handle = ok(c.cuMemCreate(2 * MIB, properties, 0))
one, two = [ok(c.cuMemAddressReserve(2 * MIB, 0, 0, 0)) for _ in "ab"]
ok(c.cuMemMap(one, 2 * MIB, 0, handle, 0))
ok(c.cuMemMap(two, 2 * MIB, 0, handle, 0))
def read(at):
    back = bytearray(1)
    ok(c.cuMemcpyDtoH(back, at, 1))
    return back[0]
ok(c.cuMemsetD8(one, 7, 2 * MIB))
seen = [read(two)]
ok(c.cuMemUnmap(one, 2 * MIB))
ok(c.cuMemUnmap(two, 2 * MIB))
ok(c.cuMemMap(one, 2 * MIB, 0, handle, 0))
say(seen + [read(one)])
"""
    )
    assert said == [7, 7]


def test_what_is_freed_costs_the_host_nothing(lab: SimLab) -> None:
    """Its pages go back, though its addresses are kept for later."""
    said = lab.cuda(
        """
def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // MIB
before = resident_mib()
it = ok(c.cuMemAlloc(64 * MIB))
ok(c.cuMemsetD8(it, 1, 64 * MIB))
full = resident_mib()
ok(c.cuMemFree(it))
again = ok(c.cuMemAlloc(64 * MIB))
say(full - before, resident_mib() - before, int(it) == int(again))
"""
    )
    assert said[0] >= 64
    assert said[1] < 8
    assert said[2]


def test_rows_are_copied_between_pitches(lab: SimLab) -> None:
    said = lab.cuda(
        """
at, pitch = ok(c.cuMemAllocPitch(3, 2, 4))
data, back = bytearray(b"abcdef"), bytearray(6)
def rows(source, target):
    it = c.CUDA_MEMCPY2D()
    it.WidthInBytes, it.Height = 3, 2
    for side, what in (("src", source), ("dst", target)):
        host = isinstance(what, bytearray)
        kind = "HOST" if host else "DEVICE"
        setattr(it, side + "MemoryType", getattr(c.CUmemorytype, "CU_MEMORYTYPE_" + kind))
        place = ctypes.addressof((ctypes.c_char * 6).from_buffer(what)) if host else what
        setattr(it, side + kind.capitalize(), place)
        setattr(it, side + "Pitch", 3 if host else pitch)
    ok(c.cuMemcpy2D(it))
rows(data, at)
rows(at, back)
second = bytearray(1)
ok(c.cuMemcpyDtoH(second, int(at) + pitch, 1))
say(back.decode(), second.decode(), pitch)
"""
    )
    assert said == ["abcdef", "d", 512]


def test_an_older_driver_has_not_the_newer_functions(tmp_path: Path) -> None:
    lab = SimLab(tmp_path, "cuda_version = 12.8\n")
    code = """
import ctypes
library = ctypes.CDLL("libcuda.so.1")
found, status = ctypes.c_void_p(), ctypes.c_int()
for name in (b"cuCtxCreate", b"cuMemGetMemPool"):
    print(library.cuGetProcAddress_v2(name, ctypes.byref(found), 13000, ctypes.c_uint64(0),
                                      ctypes.byref(status)),
          status.value, found.value == ctypes.cast(library.cuCtxCreate_v4, ctypes.c_void_p).value)
"""
    assert lab.python(code) == "0 0 True\n500 1 False\n"
