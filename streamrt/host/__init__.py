"""The host backend: streams, events and virtual devices with no GPU, and the same semantics.

`scheduler` keeps the queues, `schedules` decides which operation runs next, `memory` is the virtual devices' memory,
`backend` puts them behind the `Backend` Protocol.
"""

from __future__ import annotations

from streamrt.device import Backend
from streamrt.host.backend import HostBackend


def create_backend() -> Backend:
    """The process's host backend, under the eager schedule.  Does not touch the device."""
    return HostBackend()
