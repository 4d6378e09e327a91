"""Gate, its real program and its maps together: what a container opens."""

import errno
import os
import shutil
import stat
from pathlib import Path

import gate_programs
import pytest

from mgpu.cgroups import Cgroups, Mounts
from mgpu.cgroups.gate import Gate
from mgpu.errors import NotCapable
from mgpu.model import Container, Enforcer, Instance
from mgpu.nodes import Nodes
from mgpu.probes.loader import Loader
from mgpu.probes.tables import Tables
from mgpu.probes.tracepoints import Tracepoints

ROOT = Path(__file__).parents[2]
MINORS = {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}
EPERM, ENXIO = errno.EPERM, errno.ENXIO


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """Compiled once for all tests here; pinned under a name of this run's own."""
    pins = Path(f"/sys/fs/bpf/mgpu-test-gate-{os.getpid()}")
    run_dir = tmp_path_factory.mktemp("run")
    made = Loader(pins, ROOT / "bpf", run_dir, Tracepoints())
    try:
        made.ensure()
    except NotCapable as error:
        pytest.skip(f"eBPF programs: {error}")
    yield made
    made.teardown()
    shutil.rmtree(str(run_dir))


@pytest.fixture
def numbers():
    return Nodes().numbers()


@pytest.fixture
def tables(loader, numbers):
    tables = Tables(loader)
    tables.set_settings(numbers, 0)
    return tables


@pytest.fixture
def v2(unified):
    return Cgroups(Path("/proc"), Mounts(unified=unified.unified.mount))


@pytest.fixture
def gate(v2, loader):
    return Gate(v2, lambda: loader.program("mgpu_gate"))


@pytest.fixture
def make(v2):
    made = []

    def create(name):
        made.append(v2.create(f"test-decide-{os.getpid()}-{name}"))
        return made[-1]

    yield create
    for cgroup in made:
        v2.remove(cgroup)


def _container(cgroup, number, *uuids):
    instances = tuple(
        Instance(number * 10 + i, uuid, MINORS[uuid], number, 30, 1 << 30)
        for i, uuid in enumerate(uuids)
    )
    return Container(f"{number:064x}", cgroup, instances)


@pytest.fixture
def bind(gate, tables, numbers):
    bound = []

    def do(cgroup, number, *uuids):
        container = _container(cgroup, number, *uuids)
        gate.close(cgroup, numbers, [MINORS[uuid] for uuid in uuids])
        tables.bind(cgroup.inode, container, MINORS, Enforcer.OBSERVE)
        bound.append(cgroup)

    yield do
    for cgroup in bound:
        tables.unbind(cgroup.inode)


def _opened(v2, cgroup, numbers, dev):
    minors = (0, 1, 2, numbers.ctl_minor, 77)
    return [gate_programs.open_in(v2, cgroup, numbers.card_major, m, dev) for m in minors]


def test_its_own_cards_and_no_other(v2, make, bind, numbers, dev):
    one, two = make("one"), make("two")
    bind(one, 1, "GPU-a")
    bind(two, 2, "GPU-b", "GPU-c")
    assert _opened(v2, one, numbers, dev) == [ENXIO, EPERM, EPERM, ENXIO, EPERM]
    assert _opened(v2, two, numbers, dev) == [EPERM, ENXIO, ENXIO, ENXIO, EPERM]
    for cgroup in (one, two):
        assert gate_programs.open_in(v2, cgroup, numbers.uvm_major, numbers.uvm_minor, dev) == ENXIO
        assert gate_programs.open_in(v2, cgroup, 1, 3, dev) == 0


def test_a_cgroup_inside_is_the_containers(v2, make, bind, numbers, dev):
    outer = make("outer")
    bind(outer, 3, "GPU-b")
    v2.unified.make(f"{outer.unified}/a/b")
    inner = v2.of_path(f"{outer.unified}/a/b")
    assert _opened(v2, inner, numbers, dev) == [EPERM, ENXIO, EPERM, ENXIO, EPERM]


def test_in_a_guarded_subtree_only_the_bound_open_theirs(v2, make, gate, bind, numbers, dev):
    """The guard's program is asked too: it knows the container by its own cgroup."""
    guarded = make("guarded")
    for name in ("bound", "stranger"):
        v2.unified.make(f"{guarded.unified}/{name}")
    bound, stranger = (v2.of_path(f"{guarded.unified}/{n}") for n in ("bound", "stranger"))
    gate.guard([guarded.unified])
    bind(bound, 4, "GPU-a")
    assert _opened(v2, bound, numbers, dev) == [ENXIO, EPERM, EPERM, ENXIO, EPERM]
    assert _opened(v2, stranger, numbers, dev) == [EPERM] * 5
    # Its own program taken away by another manager: the guard still decides.
    gate.detach(bound.unified)
    assert _opened(v2, bound, numbers, dev) == [ENXIO, EPERM, EPERM, ENXIO, EPERM]
    gate.unguard()


def _make_node_in(v2, cgroup, path, number):
    """The errno of making a node, which is all that the process in ``cgroup`` does."""
    pid = os.fork()
    if pid == 0:
        answer = 255
        try:
            v2.add(cgroup, os.getpid())
            os.mknod(str(path), stat.S_IFCHR | 0o600, number)
            answer = 0
        except OSError as error:
            answer = error.errno
        finally:
            os._exit(answer)
    return os.waitpid(pid, 0)[1] >> 8


def test_nodes_are_made_before_the_bind_and_only_own_ones_after(v2, make, gate, bind, numbers, dev):
    """A runtime makes a container's nodes in its cgroup before anybody can bind it."""
    guarded = make("making")
    gate.guard([guarded.unified])
    wanted = [os.makedev(numbers.card_major, minor) for minor in (0, 1)]
    made = [_make_node_in(v2, guarded, dev / f"before-{n}", n) for n in wanted]
    assert made == [0, 0]
    assert _opened(v2, guarded, numbers, dev) == [EPERM] * 5
    bind(guarded, 8, "GPU-a")
    assert [_make_node_in(v2, guarded, dev / f"after-{n}", n) for n in wanted] == [0, EPERM]
    gate.unguard()


def test_released_inside_a_guard_it_opens_nothing(v2, make, gate, tables, bind, numbers, dev):
    guarded = make("left")
    v2.unified.make(f"{guarded.unified}/c")
    cgroup = v2.of_path(f"{guarded.unified}/c")
    gate.guard([guarded.unified])
    bind(cgroup, 5, "GPU-a")
    tables.unbind(cgroup.inode)
    gate.open(cgroup)
    assert _opened(v2, cgroup, numbers, dev) == [EPERM] * 5
    gate.unguard()


def test_elsewhere_nothing_is_closed(v2, make, bind, numbers, dev):
    bind(make("holder"), 6, "GPU-a")
    assert _opened(v2, make("host"), numbers, dev) == [ENXIO] * 5
