"""The agent, made to die by SIGKILL right before or after one of its steps.

Usage: crashing_agent.py MODULE:CLASS.METHOD before|after ARMED_FILE CONFIG. It dies at the first
such step once ARMED_FILE exists. Nothing in the agent itself knows of this.
"""

import importlib
import os
import signal
import sys


def arm(where, when, armed_file):
    module_name, _, path = where.partition(":")
    class_name, _, method_name = path.partition(".")
    owner = getattr(importlib.import_module(module_name), class_name)
    method = getattr(owner, method_name)

    def die():
        if os.path.exists(armed_file):
            os.kill(os.getpid(), signal.SIGKILL)

    def step(*arguments, **keywords):
        if when == "before":
            die()
        result = method(*arguments, **keywords)
        die()
        return result

    setattr(owner, method_name, step)


if __name__ == "__main__":
    arm(*sys.argv[1:4])
    from mgpu.daemon import main

    sys.exit(main(["--config", sys.argv[4], "run"]))
