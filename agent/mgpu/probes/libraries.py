"""Where the host's own libcuda is: what the dynamic linker would load."""

import os
import re
import subprocess
from pathlib import Path
from typing import List

NAME = "libcuda.so.1"


def host_libraries() -> List[Path]:
    """The files that a program of this host would get for libcuda.so.1; none without a driver."""
    found = [
        Path(folder) / NAME
        for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder and (Path(folder) / NAME).is_file()
    ]
    for path in _linker_cache():
        if path not in found and path.is_file():
            found.append(path)
    return found


def _linker_cache() -> List[Path]:
    try:
        said = subprocess.run(
            ["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        ).stdout.decode(errors="replace")
    except OSError:
        return []
    return [Path(path) for path in re.findall(rf"^\s*{re.escape(NAME)} .*=> (.+)$", said, re.M)]
