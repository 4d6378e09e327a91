"""bpf/mgpu.h and probes/layout.py say the same: the C compiler is asked for every offset."""

import re
import subprocess
from ctypes import Structure
from pathlib import Path

import pytest

from mgpu.probes import layout

BPF = Path(__file__).parents[2] / "bpf"


def _probe_source():
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "mgpu.h"', "int main(void) {"]
    for name, struct in layout.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        for field, *_ in struct._fields_:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof(struct {name}, {field}),'
                f" sizeof(((struct {name} *)0)->{field}));"
            )
    return "\n".join([*lines, "return 0; }"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    (folder / "probe.c").write_text(_probe_source())
    subprocess.run(
        ["gcc", "-I", str(BPF), "-o", str(folder / "probe"), str(folder / "probe.c")], check=True
    )
    said = subprocess.run([str(folder / "probe")], check=True, stdout=subprocess.PIPE)
    return {line.split()[0]: line.split()[1:] for line in said.stdout.decode().splitlines()}


@pytest.mark.parametrize("name", sorted(layout.STRUCTS))
def test_struct(name, compiled):
    struct = layout.STRUCTS[name]
    assert issubclass(struct, Structure)
    sizes = {f"{name}.{field}": getattr(struct, field) for field, *_ in struct._fields_}
    for field, descriptor in sizes.items():
        assert compiled[field] == [str(descriptor.offset), str(descriptor.size)], field


def test_every_struct_of_the_header_is_here():
    declared = set(re.findall(r"^struct (mgpu_\w+) \{", (BPF / "mgpu.h").read_text(), re.M))
    assert declared == set(layout.STRUCTS)


def test_constants():
    header = dict(re.findall(r"^#define MGPU_(\w+) (\d+)", (BPF / "mgpu.h").read_text(), re.M))
    names = re.findall(r"^([A-Z_]+) = \d+$", Path(layout.__file__).read_text(), re.M)
    assert len(names) >= 11
    for name in names:
        assert getattr(layout, name) == int(header[name]), name


def test_maps_are_those_of_the_programs():
    """Name, key, value, size and flags of each MGPU_MAP line."""
    text = "".join(path.read_text() for path in sorted(BPF.glob("*.[ch]")))
    found = {}
    for kind, key, value, name, size, flags in re.findall(
        r'^MGPU_MAP\("(\w+)", ([^,]+), ([^,]+), (\w+), (\d+), ([^)]+)\)', text, re.M
    ):
        found.setdefault(name, set()).add((kind, key, value, int(size), flags))
    c_names = {struct: f"struct {name}" for name, struct in layout.STRUCTS.items()}
    c_names.update({layout.c_uint32: "__u32", layout.c_uint64: "__u64"})
    expected = {
        name: {
            (
                {layout.bpf.MAP_TYPE_HASH: "hash", layout.bpf.MAP_TYPE_ARRAY: "array"}[
                    spec.map_type
                ],
                c_names[spec.key],
                c_names[spec.value],
                spec.max_entries,
                "BPF_F_NO_PREALLOC" if spec.flags else "0",
            )
        }
        for name, spec in layout.MAPS.items()
    }
    assert found == expected
