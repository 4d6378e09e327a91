"""What tracker `cuda` probes, held against everything that NVIDIA's header declares."""

import re
import subprocess
from pathlib import Path

import pytest

from mgpu.probes import slots
from mgpu.probes.cuda import CALLS, TRACEPOINTS
from mgpu.probes.loader import PROGRAMS

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build/sim/libcuda.so.1"  # exports whatever cuda.h declares


def words(text):
    return text.split()


# Functions that may allocate or free device memory, by their names.
SUSPECT = re.compile(
    r"cu(Mem|Array|MipmappedArray|Ctx|GreenCtx|DevicePrimaryCtx|Device\w*MemPool|Graph\w*Mem|Import"
    r"|Multicast|Destroy)\w*"
    r"(Alloc|Free|Create|Destroy|Release|Retain|Import|Map|Unmap|Pool|Reset|Attach|Detach|Node)"
)
# Those that need no probe, and why.
NO_DEVICE_MEMORY = words("""
cuMemAllocHost cuMemAllocHost_v2 cuMemFreeHost cuMemHostAlloc cuMemHostGetDevicePointer
cuMemHostRegister cuMemHostUnregister cuMemAddressReserve cuMemAddressFree cuMemGetAddressRange
cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle cuMemMapArrayAsync
cuMemMapArrayAsync_ptsz cuMemPoolDestroy cuMemPoolExportPointer cuMemPoolExportToShareableHandle
cuMemPoolGetAccess cuMemPoolGetAttribute cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo
cuDeviceSetMemPool cuMemSetMemPool cuMulticastCreate cuCtxResetPersistingL2Cache
cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphKernelNodeSetParams
cuImportExternalSemaphore cuDestroyExternalSemaphore cuDeviceGetGraphMemAttribute
cuDeviceSetGraphMemAttribute cuDeviceGraphMemTrim cuMemExportToShareableHandle
""")
ANOTHERS = words("""
cuMemImportFromShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
cuImportExternalMemory cuDestroyExternalMemory
""")  # the owner is charged
BY_THE_DRIVERS_FIGURE = words("""
cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGreenCtxCreate cuGreenCtxDestroy
cuGreenCtxStreamCreate cuCtxAttach cuCtxDetach
""")  # allocates later than the call, or too rare to probe: charged as unseen


@pytest.fixture(scope="module")
def exported():
    if not LIBRARY.exists():
        pytest.skip("the simulated libcuda is not built (make sim)")
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], check=True, stdout=subprocess.PIPE
    )
    return {line.split()[-1].split("@")[0] for line in said.stdout.decode().splitlines()}


def test_no_function_that_may_allocate_is_forgotten(exported):
    known = {*CALLS, *NO_DEVICE_MEMORY, *ANOTHERS, *BY_THE_DRIVERS_FIGURE}
    graphs = re.compile(r"cuGraph\w*(Memcpy|Memset|MemsetNode|MemcpyNode|BatchMemOp)")
    suspects = {name for name in exported if SUSPECT.match(name) and not graphs.match(name)}
    assert sorted(suspects - known) == []


def test_what_is_probed_is_declared_by_the_header(exported):
    other_forms = {"cuMemMap_ptsz"}  # older headers had it
    assert sorted(set(CALLS) - exported - other_forms) == []


def test_each_program_stands_in_its_source_and_has_a_slot():
    for source, programs in PROGRAMS.items():
        text = (ROOT / "bpf" / source).read_text()
        for name in programs:
            assert re.search(rf"^int {name}\(", text, re.M), (source, name)
    used = {name for pair in CALLS.values() for name in pair if name} | set(TRACEPOINTS.values())
    assert used == set(slots.NUMBERS)


def test_numbers_of_slots_are_for_ever():
    """Attachments of other versions carry them: a new program goes to the end."""
    assert slots.PROBES.index("mgpu_alloc") == 0
    assert slots.PROBES.index("mgpu_uuid_end") == 32
    assert slots.PROBES.index("mgpu_pool_end") == 37
    assert slots.TRACEPOINTS.index("mgpu_task_freed") == 0
    assert slots.TRACEPOINTS.index("mgpu_task_attach") == 4
    for array in slots.ARRAYS:
        numbers = [number for where, number in slots.NUMBERS.values() if where == array]
        assert len(numbers) == len(set(numbers))
        assert max(numbers) < slots.SIZE


def test_forms_of_one_function_share_a_program():
    """NAME, NAME_v2, NAME_ptsz ... differ in nothing that is counted."""
    arguments_differ = {"cuCtxCreate_v3", "cuCtxCreate_v4"}
    for name, programs in CALLS.items():
        base = re.sub(r"(_v\d)?(_ptsz)?$", "", name)
        if name not in arguments_differ:
            assert CALLS[base] == programs, name
