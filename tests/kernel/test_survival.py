"""What becomes of limits and counters when the agent dies, is upgraded, or cannot load."""

import os
import re
import shutil
import signal
import stat
import threading
from pathlib import Path

import pytest
from tests.exact import run as exact
from tests.kernel.conftest import a_node
from tests.kernel.survival import (
    is_gone,
    patched,
    program_ids,
    run_patched,
    slots_id,
    tracked,
    used_mib,
)
from tests.lab import CONTEXT_MIB, MIB, ROOT, Tenant, v2_mount, wait_for

from mgpu import bpf
from mgpu.errors import NotCapable
from mgpu.probes import capabilities
from mgpu.probes.loader import Loader
from mgpu.probes.slots import NUMBERS
from mgpu.probes.tracepoints import Tracepoints

OPTIONS = ("--device", "0", "--core", "20", "--memory", "4096")
KILLED = 128 + signal.SIGKILL
PROCESSES, THREADS, ROOM_MIB = 4, 4, 1024


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """An agent whose BPF sources are a copy."""
    source = tmp_path_factory.mktemp("source") / "bpf"
    shutil.copytree(ROOT / "bpf", source)
    with a_node(bpf_source=source, tracker="cuda") as made:
        made.source = source
        yield made


@pytest.fixture
def node(lab):
    if lab.agent is None or lab.agent.poll() is not None:
        lab.start_agent()
    yield lab
    assert wait_for(lambda: not lab.containers()), "a container was left bound"


def upgrade(node):
    """Another version of the programs: the same but for a comment."""
    with open(node.source / "gate.c", "a") as stream:
        stream.write("/* a later version */\n")


def test_an_agent_killed_at_any_step_of_its_start_is_made_good_by_the_next(lab):
    """In this order: maps half made, no program, half a set in force, half attached, not tidied."""
    steps = (
        "die_at(bpf, 'obj_pin', 3)",
        "die_at(loader, '_start', 2)",
        "die_at(slots.bpf.Map, 'update', 5)",
        "die_at(attachments.PinnedLinks, 'attach', 2)",
        "die_at(attachments.PinnedLinks, 'attach', 40)",
        "die_at(loader.Loader, 'retire', 1)",
    )
    for step in steps:
        status, said = run_patched(lab, step)
        assert status == -signal.SIGKILL, said
    lab.start_agent()
    names = [link.name for link in (lab.bpf_root / "links").iterdir()]
    places = [re.sub(r"-\d+$", "", name) for name in names]
    assert len(set(places)) == len(places), "a probe was attached twice"
    assert {name.partition("-")[0] for name in names} == {f"{slots_id(lab):x}"}
    tenant = Tenant(lab, "one", *OPTIONS)
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(lab) == CONTEXT_MIB + 100
    assert tenant.ask("free")["result"] == 0
    assert used_mib(lab) == CONTEXT_MIB
    assert tenant.ask("alloc", 4000)["result"] == "killed"


def test_a_compiler_that_is_killed_is_one_line_and_the_next_start_succeeds(node):
    node.stop_agent()
    upgrade(node)
    status, said = run_patched(
        node,
        """
real = loader._start
def start(job, environment):
    child = real(job, environment)
    if b'"process.c"' in job:
        child.kill()
    return child
loader._start = start
""",
    )
    assert status == NotCapable.exit_code, said
    assert said.splitlines()[-1] == (
        "mgpu-agent: eBPF source context.c and process.c: killed; see the journal for the whole log"
    )
    node.start_agent()


class Load:
    """Processes that allocate at random, and one that tries what must never succeed."""

    def __init__(self, node):
        self.node = node
        self.cgroups = [v2_mount() / f"{node.folder.name}-{name}" for name in ("load", "prober")]
        for cgroup, mib in zip(self.cgroups, (40960, 1024)):
            cgroup.mkdir()
            words = ("--device", "0", "--core", "20", "--memory", str(mib))
            node.cli("bind", f"/{cgroup.name}", *words)
        program = exact.build(node.folder)
        words = (THREADS, 600000, 300, ROOM_MIB)
        self.clients = [
            exact.start(node, program, self.cgroups[0], seed, *words) for seed in range(PROCESSES)
        ]
        prober = exact.build(node.folder, exact.SOURCE.with_name("prober.c"))
        self.prober = exact.start(
            node, prober, self.cgroups[1], 1024 - CONTEXT_MIB + 1, "/dev/mgpu1", "/dev/mgpu0"
        )
        self.worst_bytes = self.quiet_points = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.prober, *self.clients):
            process.kill()
            process.wait()
        for cgroup in self.cgroups:
            assert wait_for(lambda cgroup=cgroup: not (cgroup / "cgroup.procs").read_text())
            cgroup.rmdir()

    def phase(self, compare=True):
        """Wait for all clients to be quiet, compare, let them go on."""
        for client in self.clients:
            assert client.stdout.readline() == "quiet\n"
        if compare:
            self.compare()
        for client in self.clients:
            client.stdin.write("\n")
            client.stdin.flush()

    def compare(self):
        truth = exact.books(self.node)
        count = tracked(self.node)
        mine = {client.pid for client in self.clients}
        difference = [abs(truth.get(pid, 0) - count.get(pid, 0)) for pid in mine]
        self.worst_bytes = max(self.worst_bytes, *difference)
        self.quiet_points += 1

    def during(self, work, compare=True):
        """Phases until ``work`` is done; at least one."""
        done = threading.Event()
        thread = threading.Thread(target=lambda: (work(), done.set()))
        thread.start()
        while not done.is_set():
            self.phase(compare)
        thread.join()

    def end(self):
        """What the prober saw go wrong, and how often it tried."""
        self.prober.terminate()
        *wrong, rounds = self.prober.stdout.read().splitlines()
        return wrong, int(rounds.split()[1])


def test_another_version_of_the_programs_takes_over_under_load(node):
    with Load(node) as load:
        load.phase()
        old = program_ids(node, "mgpu_alloc") + program_ids(node, "mgpu_gate")
        links = {link.name for link in (node.bpf_root / "links").iterdir()}
        for _ in range(2):
            node.stop_agent(signal.SIGKILL)
            upgrade(node)
            load.during(node.start_agent)
            load.phase()
        line = [x for x in node.log().splitlines() if "programs-installed" in x][-1]
        assert f"programs={len(NUMBERS)}" in line
        assert {link.name for link in (node.bpf_root / "links").iterdir()} == links
        assert all(wait_for(lambda program=program: is_gone(program)) for program in old)
        assert len(program_ids(node, "mgpu_alloc")) == 1
        wrong, rounds = load.end()
        assert wrong == []
        assert rounds > 10
        assert load.worst_bytes == 0
        assert load.quiet_points >= 5


def anew(node, links, count):
    """Whether all links lead to the arrays that are there now."""
    names = [link.name for link in links.iterdir()]
    return len(names) == count and {n.partition("-")[0] for n in names} == {f"{slots_id(node):x}"}


def test_lost_pins_are_noticed_and_attached_anew(node):
    tenant = Tenant(node, "one", *OPTIONS)
    assert tenant.ask("alloc", 100)["result"] == 0
    links = node.bpf_root / "links"
    count = len(list(links.iterdir()))
    for link in sorted(links.iterdir())[:7]:
        link.unlink()
    assert wait_for(lambda: "attachments-lost" in node.log())
    assert wait_for(lambda: anew(node, links, count))
    assert tenant.ask("alloc", 100)["result"] == 0
    assert used_mib(node) == CONTEXT_MIB + 200
    assert tenant.ask("alloc", 4000)["result"] == "killed"


@pytest.fixture
def pins():
    root = Path(f"/sys/fs/bpf/mgpu-test-survival-{os.getpid()}")
    yield root
    if root.is_dir():
        shutil.rmtree(root)


def test_what_the_verifier_says_is_in_the_journal(lab, pins, tmp_path, caplog):
    if lab.agent is None:
        pytest.skip("no agent can run here")
    source = tmp_path / "bpf"
    shutil.copytree(ROOT / "bpf", source)
    text = (source / "gate.c").read_text()
    spoilt = text.replace("int mgpu_gate(struct bpf_cgroup_dev_ctx *ctx)\n{", SPOILT, 1)
    assert spoilt != text
    (source / "gate.c").write_text(spoilt)
    with pytest.raises(NotCapable) as refused:
        Loader(pins, source, lab.folder, Tracepoints()).ensure()
    assert "gate.c" in str(refused.value)
    assert "\n" not in str(refused.value)
    said = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "bpf-compile-failed" in said
    assert "invalid mem access" in said


SPOILT = """int mgpu_gate(struct bpf_cgroup_dev_ctx *ctx)
{
	__u64 nobody = ctx->minor;
	struct mgpu_bound *spoilt = bound.lookup(&nobody);

	if (*(volatile __u32 *)&spoilt->card_count == 77)
		return 1;
"""


def test_pins_are_for_root_alone(node):
    assert stat.S_IMODE(node.bpf_root.stat().st_mode) == 0o700
    assert node.bpf_root.stat().st_uid == 0


def test_a_folder_that_another_user_made_is_refused(pins, tmp_path, root):
    pins.mkdir()
    os.chown(pins, 65534, 65534)
    with pytest.raises(NotCapable, match="belongs to another user than root"):
        Loader(pins, ROOT / "bpf", tmp_path, Tracepoints()).ensure()


def test_return_probes_and_seccomp_filters(root):
    """The try itself: a filter that lets the process not even end tells that it is in force."""
    capabilities.require_return_probes((6, 10))
    if not os.path.exists("/sys/bus/event_source/devices/uprobe"):
        pytest.skip("this kernel has no uprobes (CONFIG_UPROBE_EVENTS)")
    exit_group = 231
    assert not capabilities.survives_return_probe((exit_group,))
    survived = capabilities.survives_return_probe()
    if survived:
        capabilities.require_return_probes((6, 11))
    else:
        with pytest.raises(NotCapable, match="seccomp"):
            capabilities.require_return_probes((6, 11))


def test_a_kernel_that_kills_at_returns_gets_no_tracker_cuda(node):
    node.stop_agent()
    status, said = run_patched(
        node,
        "from mgpu.probes import capabilities\ncapabilities.survives_return_probe = lambda: False",
    )
    assert status == NotCapable.exit_code, said
    last = said.splitlines()[-1]
    assert last.startswith("mgpu-agent: tracker cuda: this kernel kills processes under seccomp")
    node.start_agent()


def test_all_keys_of_a_map_are_found_while_others_come_and_go(root):
    """The kernel begins a walk anew when the key that it stands on is deleted."""
    try:
        fd = bpf.map_create(bpf.MAP_TYPE_HASH, 4, 8, 4096, bpf.F_NO_PREALLOC, "mgpu_test")
    except PermissionError:
        pytest.skip("needs CAP_BPF")
    held = bpf.Map(fd)
    lasting = {bytes([0, 0, low, high]) for low in range(250) for high in range(4)}
    for key in lasting:
        held.update(key, bytes(8))
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            for number in range(200):
                held.update(bytes([1, 0, number, 0]), bytes(8))
            for number in range(200):
                held.delete(bytes([1, 0, number, 0]))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            keys = held.key_list()
            assert lasting <= set(keys)
            assert len(keys) == len(set(keys))
            assert lasting <= {key for key, _ in held.items()}
    finally:
        stop.set()
        thread.join()
        held.close()


LARGER_MAP = """
sizes = dict(layout.MAPS)
sizes['ordinals'] = sizes['ordinals']._replace(max_entries=16385)
layout.MAPS.clear()
layout.MAPS.update(sizes)
"""


def test_another_layout_of_the_maps_takes_over_from_the_drivers_figures(node):
    tenant = Tenant(node, "one", *OPTIONS)
    assert tenant.ask("alloc", 1000)["result"] == 0
    with Load(node) as load:
        load.phase()
        old_slots, old_layouts = slots_id(node), layouts(node)
        node.stop_agent(signal.SIGKILL)
        objects = node.source / "objects.h"
        text = objects.read_text()
        assert "ordinals, 16384" in text
        objects.write_text(text.replace("ordinals, 16384", "ordinals, 16385"))
        load.during(lambda: node.start_agent(patched(node, LARGER_MAP)), compare=False)
        (row,) = [row for row in node.containers() if row["name"] == "one"]
        assert row["vmem_info"]["used_bytes"] == (CONTEXT_MIB + 1000) * MIB
        assert [pid["unseen_bytes"] for pid in row["vmem_info"]["pids"]] == [
            (CONTEXT_MIB + 1000) * MIB
        ]
        assert len(layouts(node)) == 1
        assert layouts(node) != old_layouts
        assert slots_id(node) != old_slots
        wrong, rounds = load.end()
        assert wrong == []
        assert rounds > 5

    assert tenant.ask("alloc", 500)["result"] == 0
    assert tenant.ask("alloc", 2400)["result"] == "killed"
    assert tenant.process.wait(timeout=10) == KILLED
    objects.write_text(text)


def layouts(node):
    return {entry.name for entry in node.bpf_root.iterdir()} - {"links"}
