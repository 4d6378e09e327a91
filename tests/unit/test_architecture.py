"""The shape of the tree: which way imports point, who owns what, and on which Python it runs."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "agent/mgpu"

# A module may import from its own layer and from those below it. What is not named here is one of
# PARTS: it deals with one thing of the kernel, the driver or the disk.
PURE, PARTS, MIDDLE, TOP = range(4)
LAYERS = {
    "mgpu": PURE,
    "mgpu.model": PURE,
    "mgpu.errors": PURE,
    "mgpu.units": PURE,
    "mgpu.rules": PURE,
    "mgpu.placement": PURE,
    "mgpu.ports": PURE,
    "mgpu.unseen": PURE,
    "mgpu.body": PURE,
    "mgpu.tables_text": PURE,
    "mgpu.compute.shares": PURE,
    "mgpu.figures": MIDDLE,
    "mgpu.views": MIDDLE,
    "mgpu.changes": MIDDLE,
    "mgpu.service": MIDDLE,
    "mgpu.api": MIDDLE,
    "mgpu.metrics": MIDDLE,
    "mgpu.reconcile": MIDDLE,
    "mgpu.agent": TOP,
    "mgpu.daemon": TOP,
    "mgpu.cli": TOP,
    "mgpu.cli_run": TOP,
    "mgpu.cli_top": TOP,
}
PURE_LIBRARY = {
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "json",
    "math",
    "re",
    "typing",
}
OWNERS = {
    "pynvml": {"mgpu.devices", "mgpu.native"},
    "sqlite3": {"mgpu.statefile", "mgpu.ledger"},
    "prometheus_client": {"mgpu.metrics"},
    "pyroute2": {"mgpu.procevents"},
}
# `mgpu-cli container info` has to be quick, and needs nothing of the agent's side.
NOT_FOR_THE_CLIENT = {"asyncio", "bcc", "prometheus_client", "pynvml", "pyroute2", "sqlite3"}
NOT_FOR_THE_DAEMON = {"bcc"}  # it would map LLVM; compiling is a child's work


def _module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(name):
    """Full names of the modules that ``name`` imports, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports in full"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found


def _layer(name):
    return LAYERS.get(name, PARTS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    above = {other for other in _imports(name) if other in MODULES and _layer(other) > _layer(name)}
    assert not above, f"{name} imports {sorted(above)} of a layer above its own"


@pytest.mark.parametrize("name", [name for name in MODULES if _layer(name) == PURE])
def test_pure_modules_do_no_input_or_output(name):
    outside = {other.split(".")[0] for other in _imports(name) if other not in MODULES}
    assert outside <= PURE_LIBRARY, f"{name} imports {sorted(outside - PURE_LIBRARY)}"
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_has_one_owner(library):
    users = {
        name for name in MODULES if any(other.split(".")[0] == library for other in _imports(name))
    }
    assert users <= OWNERS[library]


def test_no_import_cycle():
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(_imports(name)):
            if other in MODULES:
                visit(other)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize(
    ("name", "unwanted"), [("mgpu.cli", NOT_FOR_THE_CLIENT), ("mgpu.daemon", NOT_FOR_THE_DAEMON)]
)
def test_what_an_entry_point_does_not_load(name, unwanted):
    code = f"import sys, {name}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert not unwanted & set(loaded)


def _sources():
    for folder in ("agent", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_syntax_of_python_3_8():
    for path in _sources():
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 8))


def test_library_of_python_3_8():
    """vermin knows in which version each function and argument came."""
    vermin = shutil.which("vermin") or shutil.which("vermin", path=os.path.dirname(sys.executable))
    if vermin is None:
        pytest.skip("vermin is not installed (packaging/lint-requirements.txt)")
    done = subprocess.run(
        [vermin, "--quiet", "--no-tips", "--violations", "-t=3.8-", str(PACKAGE)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_modules_are_of_a_size_to_read():
    long = {
        name: lines
        for name, path in MODULES.items()
        for lines in [len(path.read_text(encoding="utf-8").splitlines())]
        if lines > 450
    }
    assert not long


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), f"{name} has no docstring"


def _repository_files():
    for folder, folders, files in os.walk(str(ROOT)):
        folders[:] = [
            f
            for f in folders
            if f not in ("build", "__pycache__") and not f.endswith(".egg-info") and f[:1] != "."
        ]
        yield from (Path(folder, file) for file in files)
    yield from (ROOT / ".ci").iterdir()


def test_nothing_of_one_machine_is_in_the_repository():
    """Neither where somebody's checkout lies nor where somebody's packages come from."""
    words = [
        "/" + "work" + "/",
        "py" + "pi.org",
        "python" + "hosted.org",
        "deb." + "debian.org",
        "/opt/" + "pypi",
        "/opt/" + "wheels",
    ]
    for path in _repository_files():
        text = path.read_bytes().decode("utf-8", "replace")
        assert not [word for word in words if word in text], path
