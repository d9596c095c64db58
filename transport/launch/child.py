"""The main program of a `local_workers` child: serves its parent over the inherited socket, and dies with it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

from transport.agent import Agent, set_default_agent
from transport.launch.environment import set_up_process
from transport.launch.functions import ChildService
from transport.limits import Limits
from transport.links import unix_link

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Blocks the host until the parent is done with us."""
    options = json.loads(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options["parent"]:
        return 0  # the parent died before we could ask to die with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends us
    sys.path[:] = options["path"]
    set_up_process()
    agent = Agent(
        name=options["name"],
        service=ChildService(arrays=options["arrays"]),
        threads=options["threads"],
        devices=[options["device"]],
    )
    set_default_agent(agent)
    link = unix_link.UnixLink(socket.socket(fileno=options["descriptor"]), inherited=True)
    driver = agent.add(link, initiator=False, limits=Limits(same_host=True))
    driver.ended.wait()
    agent.close(timeout=1.0)
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a function that is still running must not keep the process
