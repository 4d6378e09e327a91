"""A GPU program as a tenant runs it: NVIDIA's own Python binding, nothing of mgpu in it.

Reads commands from standard input, one a line, and answers each with one JSON line:
``alloc MIB [DEVICE]``, ``free``, ``info [DEVICE]``, ``count``, ``exit``.
"""

import json
import sys
from typing import Dict, List

from cuda.bindings import driver as cuda

MIB = 1024 * 1024


class Client:
    def __init__(self) -> None:
        self.contexts: Dict[int, object] = {}
        self.pointers: List[object] = []

    def use(self, ordinal: int) -> int:
        """Make the primary context of one card current; the CUresult of it."""
        if ordinal not in self.contexts:
            result, device = cuda.cuDeviceGet(ordinal)
            if result == 0:
                result, self.contexts[ordinal] = cuda.cuDevicePrimaryCtxRetain(device)
            if result != 0:
                return int(result)
        (result,) = cuda.cuCtxSetCurrent(self.contexts[ordinal])
        return int(result)

    def alloc(self, mib: str, ordinal: str = "0") -> Dict[str, object]:
        result = self.use(int(ordinal))
        if result == 0:
            outcome, pointer = cuda.cuMemAlloc(int(mib) * MIB)
            result = int(outcome)
            if result == 0:
                self.pointers.append(pointer)
        return {"result": result}

    def free(self) -> Dict[str, object]:
        (result,) = cuda.cuMemFree(self.pointers.pop())
        return {"result": int(result)}

    def info(self, ordinal: str = "0") -> Dict[str, object]:
        result = self.use(int(ordinal))
        if result:
            return {"result": result}
        outcome, free_bytes, total_bytes = cuda.cuMemGetInfo()
        return {"result": int(outcome), "free_bytes": free_bytes, "total_bytes": total_bytes}

    def count(self) -> Dict[str, object]:
        result, count = cuda.cuDeviceGetCount()
        return {"result": int(result), "count": count}


def main() -> int:
    (result,) = cuda.cuInit(0)
    print(json.dumps({"init": int(result)}), flush=True)
    if result != 0:
        return 1
    client = Client()
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "exit":
            break
        answer = getattr(client, verb)(*arguments)
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
