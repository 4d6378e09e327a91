#!/usr/bin/env python3
"""Write C for every function that nvml.h declares: a weak one that says "not supported".

    cc -E -P -DNVML_NO_UNVERSIONED_FUNC_DEFS nvml.h | nvml_stubs.py > nvml_stubs.c

nvml.c and its siblings define what the simulation does have; the linker prefers those. So a client
finds each symbol that its version of the header promises, as in the real library.
"""

import re
import sys

PROTOTYPE = re.compile(r"\bnvmlReturn_t\s+(nvml\w+)\s*\(([^()]*)\)$")


def main() -> None:
    declared = {}
    for statement in sys.stdin.read().split(";"):
        found = PROTOTYPE.search(" ".join(statement.split()))
        if found:
            declared[found.group(1)] = found.group(2)
    print('#include "nvml_sim.h"')
    for name, parameters in sorted(declared.items()):
        print(
            f"__attribute__((weak)) nvmlReturn_t {name}({parameters}) {{ return unsupported(); }}"
        )


main()
