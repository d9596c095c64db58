"""What a process of its own sets, and a library must not."""

from __future__ import annotations

import os
import sys

from transport.responsive import SHORT_SECONDS

DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # fewer hardware queues let unrelated streams wait for each other
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX would take most of a GPU that it shares
}


def child_environment() -> dict[str, str]:
    """The environment of a worker: ours, and the defaults where the user set nothing.  Does not touch the device."""
    environment = {**DEFAULTS, **os.environ}
    path = [entry for entry in sys.path if entry]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment


def set_up_process() -> None:
    """Sets the same for this process, and the interpreter's switch interval.  Does not touch the device."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    sys.setswitchinterval(SHORT_SECONDS)
