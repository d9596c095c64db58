"""The main program of a `local_workers` child: serves its parent over the inherited socket, and dies with it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time

from streamrt.errors import DeviceError, UnavailableError
from transport import process
from transport.agent import Agent, set_default_agent
from transport.launch.environment import set_up_process
from transport.launch.functions import ChildService
from transport.limits import Limits
from transport.links import unix_link

UNWATCHED = -1
ASK_SECONDS = 0.5
LAST_SECONDS = 5.0  # for the calls that run when the device has failed


def main() -> int:
    """Blocks the host until the parent is done with us."""
    options = json.loads(sys.argv[1])
    parent = options["parent"]
    try:
        watched = process.open_pidfd(parent, 0)
    except UnavailableError:
        watched = UNWATCHED
    if watched is None or os.getppid() != parent:
        return 0  # the parent died before we could watch it
    threading.Thread(target=_die_with, args=(parent, watched), name="streamrt-parent", daemon=True).start()
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
    failures: list[DeviceError] = []

    def end(error: DeviceError) -> None:
        failures.append(error)
        driver.goodbye()  # what is known already is said
        over = threading.Timer(LAST_SECONDS, driver.abort, ["the device has failed"])
        over.daemon = True
        over.start()

    agent.on_device_error = end
    driver.ended.wait()
    agent.close(timeout=1.0)
    if failures:
        sys.stderr.write(f"{options['name']} ends, since its device has failed: {failures[0]}\n")
        return process.DEVICE_FAILED
    return 0


def _die_with(parent: int, pidfd: int) -> None:
    """Ends this process at once when the parent's has ended.  (PR_SET_PDEATHSIG goes by the parent's *thread*.)

    Where that cannot be watched, it asks now and then whose child this process is.
    """
    if pidfd == UNWATCHED:
        while os.getppid() == parent:
            time.sleep(ASK_SECONDS)
    else:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        waiting.poll()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a function that is still running must not keep the process
