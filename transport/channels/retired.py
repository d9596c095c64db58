"""Memory that was exported over a connection that has ended: kept until the peer has unmapped it, or is gone.

Freeing memory that another process maps is undefined.  So it is looked at the words that peers write when they unmap
(`keeper`).  What a frozen process has mapped stays.

Does not touch the device, but for the owners that it drops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transport.channels.keeper import Keeper


class _Memory(NamedTuple):
    memory: object
    over: Callable[[], bool]
    dropped: Callable[[], object]


keeper: Keeper[_Memory] = Keeper(
    "streamrt-retired", lambda one: one.over(), lambda one: one.dropped(), first=0.01, longest=1.0
)


def keep(memory: object, over: Callable[[], bool], dropped: Callable[[], object]) -> None:
    """Keeps `memory` until `over()`, then drops it and calls `dropped`.  Does not block the host."""
    keeper.keep(_Memory(memory, over, dropped))


def kept() -> int:
    """How many pieces of memory wait for their peers.  Does not touch the device."""
    return len(keeper)
