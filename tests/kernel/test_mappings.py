"""Being told of executable mappings, also when they come faster than they are read."""

import mmap
import os
import threading

import pytest
from tests.lab import wait_for

from mgpu.probes.mappings import Mappings

MANY = 6000  # records of more than 100 bytes each; a ring holds 256 KiB


@pytest.fixture
def library(root, tmp_path):
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def map_it(path, times=1):
    """Map the file for execution and let go of it, so often."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(times):
        mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    os.close(fd)


def test_a_mapping_is_told_with_its_process_and_path(library):
    told = []
    mappings = Mappings(lambda pid, path: told.append((pid, path)), lambda: None)
    mappings.start()
    try:
        map_it(library)
        assert wait_for(lambda: (os.getpid(), str(library)) in told)
    finally:
        mappings.stop()


def test_mappings_that_came_too_fast_are_told_to_be_lost(library):
    slow, lost, cpus = threading.Event(), threading.Event(), os.sched_getaffinity(0)
    mappings = Mappings(lambda pid, path: slow.wait(60), lost.set)
    mappings.start()
    try:
        for cpu in cpus:
            os.sched_setaffinity(0, {cpu})
            map_it(library, MANY)
        assert not lost.is_set()
        slow.set()
        # The kernel says it with the next record that has room.
        assert wait_for(lambda: map_it(library) or lost.is_set())
    finally:
        os.sched_setaffinity(0, cpus)
        slow.set()
        mappings.stop()
