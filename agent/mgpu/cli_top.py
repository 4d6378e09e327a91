"""``mgpu-cli top``: usage of devices and instances, redrawn until interrupted."""

import shutil
import sys
import time

from mgpu import tables_text
from mgpu.client import Client

HOME_AND_CLEAR = "\x1b[H\x1b[2J"


def top(client: Client, interval_s: float, once: bool) -> int:
    """Frames every ``interval_s``; one only with ``once`` or where there is no terminal."""
    if once or not sys.stdout.isatty():
        print(tables_text.top(client.top()))
        return 0
    try:
        while True:
            frame = _clipped(tables_text.top(client.top()))
            sys.stdout.write(HOME_AND_CLEAR + frame)
            sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        print()
        return 0


def _clipped(frame: str) -> str:
    """As much as the terminal shows: a wrapped line would push the rest out of place."""
    width, height = shutil.get_terminal_size()
    return "\n".join(line[:width] for line in frame.split("\n")[:height])
