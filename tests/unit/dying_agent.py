"""An agent's front that dies by SIGKILL at a given step of a change, for test_killed.py.

python dying_agent.py FOLDER STEP      STEP: resolve, commit, apply, answer or none
"""

import os
import signal
import sys
import threading
from pathlib import Path

from front_doubles import Node

from mgpu.api import Api
from mgpu.httpd import HttpServer


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def main(folder: Path, step: str) -> None:
    node = Node(folder)
    node.groups.make("/containers/aaaa")
    for container in node.ledger.containers():
        if container.cgroup.path.startswith("/mgpu/"):
            node.groups.alive[container.cgroup.path] = container.cgroup
            node.groups.inside[container.cgroup.inode] = []
    api = Api(node.service)
    server = HttpServer([api.site(str(folder / "agent.sock"), "root")])
    server.start()
    print("ready", flush=True)
    if sys.stdin.readline() == "arm\n":
        _arm(node, step)
        print("armed", flush=True)
    sys.stdin.read()


def _arm(node: Node, step: str) -> None:
    if step == "resolve":
        node.figures.config = die  # type: ignore[assignment]
    elif step == "commit":
        node.during_apply = die
    elif step == "apply":
        node.groups.add = die  # type: ignore[method-assign]
        node.figures.container_rows = die  # type: ignore[method-assign]
    elif step == "answer":
        node.figures.container_rows = die  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
