# requires: core
"""A service of registered functions in a `streamrt-worker` process, called over loopback.

This file is both the module that the daemon serves (``streamrt-worker service:service``) and the program that calls it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import transport

service = transport.Service()


@service.setup
def load(device: str) -> np.ndarray:
    """Runs once for a device; what it returns is each function's first argument."""
    return np.linspace(0.0, 1.0, 1000)


@service.function
def lookup(table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Only registered functions may be called by others."""
    return table[positions]


def main() -> None:
    """Starts the daemon, calls it, shows an error of its, and ends it."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    command = [sys.executable, "-m", "transport.worker", "service:service", "--listen", "tcp://127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--device", "host:0"], stdout=subprocess.PIPE, env=environment, text=True
    ) as daemon:
        try:
            assert daemon.stdout is not None
            ready = daemon.stdout.readline()  # it names the address: the port was the system's choice
            address = next(word.removeprefix("listen=") for word in ready.split() if word.startswith("listen="))
            with transport.connect(address) as peer:
                print("lookup:", peer.call("lookup", np.array([0, 500, 999]), timeout=20))
                try:
                    peer.call("erase", timeout=20)
                except transport.UnknownFunctionError as error:
                    print("refused:", error)
        finally:
            daemon.terminate()
    print("the worker drained and ended with", daemon.returncode)


if __name__ == "__main__":
    main()
