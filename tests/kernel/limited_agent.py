"""The agent as on a kernel whose programs may call less: before 6.1 (gate), before 5.15 (all).

Usage: limited_agent.py CONFIG DEFINE...
"""

import sys

from mgpu.daemon import main
from mgpu.probes import helpers

if __name__ == "__main__":
    lacking = dict.fromkeys(sys.argv[2:], 1)
    helpers.defines = lambda: lacking
    sys.exit(main(["--config", sys.argv[1], "run"]))
