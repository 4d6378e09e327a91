#!/usr/bin/env python3
"""Write the exported side of libcuda.so.1 from NVIDIA's own headers.

    cc -E -P -D__CUDA_API_VERSION_INTERNAL cuda.h > cuda.i
    cuda_exports.py header cuda.i > cuda_impl.h
    cuda_exports.py source cuda.i cudaTypedefs.h > cuda_exports.c

Every function F of cuda.h is exported. It does nothing but call impl_F, where the simulation has
one; else it says "not supported". The forms F_ptsz and F_ptds call what F calls. The library never
calls its own exports, so that a probe on an export fires once for each call of a client.
"""

import re
import sys
from typing import Dict, List, Tuple

PROTOTYPE = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\((.*)\)$")
TYPEDEF = re.compile(r"\*\s*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)")
ERROR = re.compile(r"\b(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)")
SUFFIX = re.compile(r"(?:_v(\d+))?(_ptsz|_ptds)?$")


def prototypes(text: str) -> Dict[str, str]:
    """Name to parameter list of each function that the preprocessed cuda.h declares."""
    found = {}
    for statement in text.split(";"):
        match = PROTOTYPE.search(" ".join(statement.split()))
        if match and "typedef" not in statement:
            found[match.group(1)] = match.group(2).strip()
    return found


def arguments(parameters: str) -> str:
    """The names in a parameter list, to be passed on."""
    if parameters in ("", "void"):
        return ""
    names = []
    for parameter in parameters.split(","):
        names.append(re.findall(r"\w+", parameter.split("[")[0])[-1])
    return ", ".join(names)


def implementation(name: str) -> str:
    return "impl_" + re.sub(r"_pt[sd][sz]$", "", name)


def header(functions: Dict[str, str]) -> List[str]:
    lines = ["#include <cuda.h>", "#pragma GCC visibility push(hidden)"]
    for name, parameters in sorted(functions.items()):
        if implementation(name) == "impl_" + name:
            lines.append(f"CUresult impl_{name}({parameters});")
            lines.append(f"#pragma weak impl_{name}")
    return [*lines, "#pragma GCC visibility pop"]


def export(name: str, parameters: str) -> str:
    impl = implementation(name)
    call = f"{impl}({arguments(parameters)})"
    body = f"return {impl} ? {call} : CUDA_ERROR_NOT_SUPPORTED;"
    return f"EXPORT CUresult {name}({parameters}) {{ {body} }}"


def by_version(functions: Dict[str, str], typedefs: str) -> List[Tuple[str, int, str, str]]:
    """(base name, CUDA version from which on, symbol, symbol for per-thread default streams).

    cudaTypedefs.h says with which versions a function changed, cuda.h what its forms are called:
    the n-th version is the n-th form.
    """
    versions: Dict[str, set] = {}
    for base, version, _ in TYPEDEF.findall(typedefs):
        versions.setdefault(base, set()).add(int(version))
    rows = []
    for base, since in sorted(versions.items()):
        forms = sorted(
            (int(SUFFIX.search(name[len(base) :]).group(1) or 1), name)
            for name in functions
            if re.fullmatch(re.escape(base) + r"(_v\d+)?", name)
        )
        for version, (_, name) in zip(sorted(since), forms[-len(since) :]):
            threaded = [name + s for s in ("_ptsz", "_ptds") if name + s in functions]
            rows.append((base, version, name, threaded[0] if threaded else name))
    return rows


def source(text: str, typedefs: str) -> List[str]:
    functions = prototypes(text)
    lines = ['#include "cuda_sim.h"', '#define EXPORT __attribute__((visibility("default")))']
    lines += [export(name, parameters) for name, parameters in sorted(functions.items())]
    lines.append("const struct procedure procedures[] = {")
    for base, version, name, threaded in by_version(functions, typedefs):
        lines.append(f'    {{"{base}", {version}, (void *){name}, (void *){threaded}}},')
    lines.append("    {0}};")
    lines.append("const struct error_text error_texts[] = {")
    for name, number in sorted(set(ERROR.findall(text)), key=lambda pair: int(pair[1])):
        words = name.replace("CUDA_ERROR_", "").replace("CUDA_", "").replace("_", " ").lower()
        lines.append(f'    {{{number}, "{name}", "{"no error" if number == "0" else words}"}},')
    lines.append("    {0}};")
    return lines


def main() -> None:
    with open(sys.argv[2], encoding="utf-8") as preprocessed:
        text = preprocessed.read()
    if sys.argv[1] == "header":
        lines = header(prototypes(text))
    else:
        with open(sys.argv[3], encoding="utf-8") as typedefs:
            lines = source(text, typedefs.read())
    print("\n".join(lines))


main()
